"""One request that makes an object visible, and whether it was ours that did.

Neighbours: `s3.S3Store.put` runs it alone, `s3_writer.S3Writer` for bodies of one part and for the completion of
larger ones. See the note "A lost answer" in README.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from raydz.storage.retry import with_retries
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import s3_errors
from raydz.storage.s3_reader import S3Reader
from raydz.storage.store import AlreadyExists, NotFound, ObjectInfo

_TOKEN = "raydz-put"


class S3Put:
    """A put with an identity: a token in the object's metadata, so that a repeated request knows its own work."""

    def __init__(self, connection: S3Connection, bucket: str, key: str) -> None:
        self._connection = connection
        self._reader = S3Reader(connection, bucket, key)
        self._token = uuid.uuid4().hex
        self.where = self._reader.where
        self.target: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self.identity: dict[str, Any] = {"Metadata": {_TOKEN: self._token}}

    def run(self, body: bytes | bytearray, *, if_absent: bool = False) -> ObjectInfo:
        """Put a whole body in one request.

        Raises:
            AlreadyExists: `if_absent`, and another put was first.
        """
        checksum = self._connection.checksum
        chosen: dict[str, Any] = {} if checksum is None else dict(checksum.value(checksum.of(body)))
        if if_absent:
            chosen["IfNoneMatch"] = "*"

        def once() -> dict[str, Any]:
            return self._connection.client.put_object(
                **self.target, **self.identity, **self._connection.encryption, **chosen, Body=body
            )

        etag = self.settle(once, refusals=("PreconditionFailed", "412"))
        if etag is None:
            raise AlreadyExists("the object exists", where=self.where, wanted="a key not yet taken")
        return ObjectInfo(len(body), etag)

    def settle(self, once: Callable[[], dict[str, Any]], refusals: tuple[str, ...]) -> str | None:
        """Make the request until it is certain who made the object: its etag if we did, None if the store refused us.

        boto3 repeats a request whose answer was lost, and the store may refuse the repetition (with a code among
        `refusals`) because of the first one, which was ours.
        """

        def attempt() -> str | None:
            with s3_errors(self.where):
                try:
                    return once()["ETag"]
                except self._connection.client.exceptions.ClientError as error:
                    if error.response["Error"]["Code"] not in refusals:
                        raise
                    return self._own_etag()

        return with_retries(attempt, self._connection.rounds)

    def _own_etag(self) -> str | None:
        try:
            found = self._reader.head()
        except NotFound:
            return None
        return found["ETag"] if found["Metadata"].get(_TOKEN) == self._token else None

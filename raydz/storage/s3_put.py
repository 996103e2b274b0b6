"""One request that makes an object visible, and whether it was ours that did.

Neighbours: `s3.S3Store.put` runs it alone, `s3_writer.S3Writer` for bodies of one part and for the completion of
larger ones. See the note "A lost answer" in README.md.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from raydz.errors import StorageError
from raydz.storage.retry import with_retries
from raydz.storage.s3_body import as_body
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import s3_errors
from raydz.storage.s3_reader import S3Reader
from raydz.storage.store import AlreadyExists, NotFound, ObjectInfo

_TOKEN = "raydz-put"


class Written(NamedTuple):
    """Bytes [start, stop) of an object as they were written, by their CRC-32."""

    start: int
    stop: int
    crc: int


class S3Put:
    """A put with an identity: a token in the object's metadata, so that a repeated request knows its own work."""

    def __init__(self, connection: S3Connection, bucket: str, key: str) -> None:
        self._connection = connection
        self._reader = S3Reader(connection, bucket, key)
        self._token = uuid.uuid4().hex
        self.where = self._reader.where
        self.target: dict[str, Any] = {"Bucket": bucket, "Key": key}
        self.identity: dict[str, Any] = {"Metadata": {_TOKEN: self._token}}

    def run(self, body: bytes | bytearray | memoryview, *, if_absent: bool = False) -> ObjectInfo:
        """Put a whole body in one request.

        Raises:
            AlreadyExists: `if_absent`, and another put was first.
        """
        checksum = self._connection.checksum
        chosen: dict[str, Any] = {} if checksum is None else dict(checksum.value(checksum.of(body)))
        looks = if_absent and not self._connection.has_conditions
        if looks and self._reader.is_there():
            raise self._taken()
        if if_absent and not looks:
            chosen["IfNoneMatch"] = "*"

        def once() -> dict[str, Any]:
            return self._connection.client.put_object(
                **self.target, **self.identity, **self._connection.encryption, **chosen, Body=as_body(body)
            )

        etag = self.settle(once, refusals=("PreconditionFailed", "412"))
        if etag is None or (looks and self._own_etag() is None):  # another's put came between our look and our put
            raise self._taken()
        if self._connection.reads_back:
            self.read_back(etag, [Written(0, len(body), zlib.crc32(body))])
        return ObjectInfo(len(body), etag)

    def read_back(self, etag: str, written: Iterable[Written], run: Callable[..., Iterable[Any]] = map) -> None:
        """Read the object that was just made and compare; one that differs is deleted. `run` may be a pool's map.

        Raises:
            StorageError: it differs.
        """
        differing = [error for error in run(lambda part: self._compare(etag, part), written) if error]
        if differing:
            with s3_errors(self.where):
                self._connection.client.delete_object(**self.target)
            raise differing[0]

    def _compare(self, etag: str, part: Written) -> StorageError | None:
        body = self._reader.get(part.start, part.stop, etag)
        if len(body) == part.stop - part.start and zlib.crc32(body) == part.crc:
            return None
        return StorageError(
            "the store returned other bytes than were written, and they were deleted",
            where=f"{self.where}, bytes {part.start}..{part.stop}",
            got=f"{len(body)} bytes with CRC-32 {zlib.crc32(body):08x}",
            wanted=f"{part.stop - part.start} bytes with {part.crc:08x}",
            remedy="the store, a proxy or the memory of this machine changes data; use another store",
        )

    def _taken(self) -> AlreadyExists:
        return AlreadyExists("the object exists", where=self.where, wanted="a key not yet taken")

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

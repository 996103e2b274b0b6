"""A store in an S3 bucket.

Neighbours: opened by `raydz.storage.open_store`; reads are in `s3_reader`, writes in `s3_writer` and `s3_put`,
the client in `s3_client`; the promises are those of `store.Store`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

from raydz.storage.options import S3Options
from raydz.storage.probe import CONDITIONS, probe, warn_of
from raydz.storage.retry import with_retries
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import from_code, s3_errors
from raydz.storage.s3_probe import probe_transfers
from raydz.storage.s3_put import S3Put
from raydz.storage.s3_reader import S3Reader
from raydz.storage.s3_writer import S3Writer
from raydz.storage.store import (
    Buffer,
    Names,
    NotFound,
    ObjectInfo,
    Objects,
    StoredObject,
    check_key,
    check_prefix,
    check_range,
    flat_view,
)

DELETE_BATCH = 1000
"""Keys that one DeleteObjects request may name."""


class S3Store:
    """Keys are joined to `prefix` with a slash."""

    def __init__(self, bucket: str, prefix: str, options: S3Options) -> None:
        self._connect(bucket, prefix, S3Connection(options))

    def _connect(self, bucket: str, prefix: str, connection: S3Connection) -> None:
        self.bucket, self.prefix = bucket, prefix
        self.uri = f"s3://{bucket}/{prefix}".rstrip("/")
        self._root = f"{check_prefix(prefix, self.uri)}/" if prefix else ""
        self._connection = connection

    def __repr__(self) -> str:
        return f"S3Store({self.uri!r}, {self._connection.options})"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        view = flat_view(data)
        if len(view) > self._connection.options.part_bytes_max and not if_absent:
            with self.writer(key, len(view)) as out:
                out.write(view)
            return
        body = data if isinstance(data, (bytes, bytearray)) else bytes(view)
        S3Put(self._connection, self.bucket, self._full(key)).run(body, if_absent=if_absent)

    def writer(self, key: str, expected_bytes: int | None = None) -> S3Writer:
        """See `Store.writer`."""
        return S3Writer(self._connection, self.bucket, self._full(key), expected_bytes)

    def get(self, key: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None) -> bytes:
        """See `Store.get`."""
        reader = self._reader(key)
        first, stop = check_range(start, stop, reader.where)
        return reader.get(first, stop, if_match)

    def read_into(self, key: str, start: int, out: memoryview, *, if_match: str | None = None) -> None:
        """See `Store.read_into`."""
        reader = self._reader(key)
        check_range(start, None, reader.where)
        reader.read_into(start, flat_view(out), if_match)

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`; a bucket that does not exist looks like a missing object here (`probe_writable` tells)."""
        try:
            found = self._reader(key).head()
        except NotFound:
            return None
        return ObjectInfo(found["ContentLength"], found["ETag"])

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self.head(key) is not None

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        return [found.key for found in self.list_objects(prefix)]

    def list_objects(self, prefix: str = "") -> Objects:
        """See `Store.list_objects`."""
        found = [
            StoredObject(entry["Key"].removeprefix(self._root), entry["Size"], entry["LastModified"].timestamp())
            for page in self._pages("list_objects_v2", Prefix=self._root + check_prefix(prefix, self.uri))
            for entry in page.get("Contents", ())
            if not entry["Key"].endswith("/")  # folder markers of web consoles
        ]
        return sorted(found, key=lambda stored: stored.key)  # Express One Zone does not sort

    def list_folders(self, prefix: str = "") -> Names:
        """See `Store.list_folders`."""
        folder = self._root + check_prefix(prefix, self.uri)
        if folder and not folder.endswith("/"):
            folder += "/"
        return sorted(
            entry["Prefix"].removeprefix(folder).rstrip("/")
            for page in self._pages("list_objects_v2", Prefix=folder, Delimiter="/")
            for entry in page.get("CommonPrefixes", ())
        )

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        full = [self._full(key) for key in keys]
        for begin in range(0, len(full), DELETE_BATCH):
            batch = full[begin : begin + DELETE_BATCH]
            self._retrying(lambda batch=batch: self._delete_batch(batch))

    def sweep(self, older_than_s: float) -> int:
        """See `Store.sweep`; an upload's age counts from its begin."""
        oldest = time.time() - older_than_s
        uploads = [
            upload
            for page in self._pages("list_multipart_uploads", Prefix=self._root)
            for upload in page.get("Uploads", ())
            if upload["Initiated"].timestamp() <= oldest
        ]
        return sum(self._retrying(lambda upload=upload: self._abort(upload)) for upload in uploads)

    def probe_writable(self) -> Names:
        """See `Store.probe_writable`."""
        hurried = S3Store.__new__(S3Store)
        hurried._connect(self.bucket, self.prefix, self._connection.impatient())
        try:
            has_conditions = probe(hurried, requires_conditions=self._connection.options.conditional_put == "require")
            weaknesses = [] if has_conditions else [CONDITIONS]
            weaknesses += probe_transfers(hurried._connection, self.bucket, self._root)
        finally:
            hurried._connection.close()
        warn_of(weaknesses, self.uri)
        return weaknesses

    def make_up_for(self, weaknesses: Iterable[str]) -> None:
        """See `Store.make_up_for`."""
        self._connection.weaknesses |= set(weaknesses)

    def _full(self, key: str) -> str:
        return check_key(self._root + check_key(key, self.uri), self.uri)

    def _reader(self, key: str) -> S3Reader:
        return S3Reader(self._connection, self.bucket, self._full(key))

    def _retrying(self, call: Any) -> Any:
        return with_retries(call, rounds=self._connection.rounds)

    def _pages(self, operation: str, **arguments: Any) -> Iterator[dict[str, Any]]:
        pages = iter(self._connection.client.get_paginator(operation).paginate(Bucket=self.bucket, **arguments))
        while True:
            with s3_errors(self.uri):
                page = next(pages, None)
            if page is None:
                return
            yield page

    def _delete_batch(self, keys: Names) -> None:
        with s3_errors(self.uri):
            answer = self._connection.client.delete_objects(
                Bucket=self.bucket, Delete={"Objects": [{"Key": key} for key in keys], "Quiet": True}
            )
        for failed in answer.get("Errors", ()):
            if failed["Code"] != "NoSuchKey":
                raise from_code(failed["Code"], f"s3://{self.bucket}/{failed['Key']}")

    def _abort(self, upload: dict[str, Any]) -> int:
        where = f"s3://{self.bucket}/{upload['Key']}"
        with s3_errors(where):
            try:
                self._connection.client.abort_multipart_upload(
                    Bucket=self.bucket, Key=upload["Key"], UploadId=upload["UploadId"]
                )
            except self._connection.client.exceptions.NoSuchUpload:
                return 0  # its owner was faster
        return 1

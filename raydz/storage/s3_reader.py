"""Reading from S3: whole objects, ranges into memory, and going on after a connection that broke off.

Neighbours: called by `s3.S3Store.get` and `read_into`; requests go through `s3_client.S3Connection`.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from raydz.errors import StorageError
from raydz.storage.bandwidth import READ_BYTES
from raydz.storage.retry import with_retries
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import s3_errors
from raydz.storage.store import NotFound, ends_early


@dataclass(frozen=True)
class S3Reader:
    """Reads of one object."""

    connection: S3Connection
    bucket: str
    key: str

    @property
    def where(self) -> str:
        """The object's URI."""
        return f"s3://{self.bucket}/{self.key}"

    def get(self, start: int, stop: int | None, if_match: str | None) -> bytes:
        """See `Store.get`."""
        if stop == start:
            self.head()  # no HTTP range is empty, but a missing object still has to be told
            return b""
        whole = start == 0 and stop is None
        byte_range = {} if whole else {"Range": f"bytes={start}-{'' if stop is None else stop - 1}"}
        return with_retries(lambda: self._get_once(byte_range, if_match), self.connection.rounds)

    def _get_once(self, byte_range: dict[str, str], if_match: str | None) -> bytes:
        with s3_errors(self.where):
            try:
                response = self._request(byte_range, if_match)
            except self.connection.client.exceptions.ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] == 416:  # starts at or past the end
                    return b""
                raise
            with closing(response["Body"]) as body:
                if byte_range:
                    _check_range_kept(response, self.where, byte_range["Range"])
                return self._read_all(body)

    def _read_all(self, body: Any) -> bytes:
        bandwidth = self.connection.bandwidth
        if bandwidth is None:
            return body.read()
        pieces = []
        while piece := body.read(READ_BYTES):
            bandwidth.take(len(piece))
            pieces.append(piece)
        return b"".join(pieces)

    def head(self) -> dict[str, Any]:
        """The answer to a HEAD request.

        Raises:
            NotFound: no such object.
        """

        def once() -> dict[str, Any]:
            with s3_errors(self.where):
                return self.connection.client.head_object(Bucket=self.bucket, Key=self.key)

        return with_retries(once, self.connection.rounds)

    def is_there(self) -> bool:
        """Whether the object can be seen."""
        try:
            self.head()
        except NotFound:
            return False
        return True

    def read_into(self, start: int, out: memoryview, if_match: str | None) -> None:
        """See `Store.read_into`: in parallel slices where `out` is larger than one part."""
        if len(out) == 0:
            return
        slice_bytes = self.connection.options.part_bytes_max
        if len(out) <= slice_bytes:
            _RangeRead(self, start, out, if_match).run()
            return
        # All slices must come from one version of the object.
        etag = if_match or self.head()["ETag"]
        reads = [
            _RangeRead(self, start + offset, out[offset : offset + slice_bytes], etag)
            for offset in range(0, len(out), slice_bytes)
        ]
        with ThreadPoolExecutor(self.connection.options.concurrency, thread_name_prefix="raydz-s3-read") as pool:
            futures = [pool.submit(read.run) for read in reads]
            try:
                for future in futures:
                    future.result()
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _request(self, byte_range: dict[str, str], if_match: str | None) -> dict[str, Any]:
        condition = {"IfMatch": if_match} if if_match else {}
        return self.connection.client.get_object(Bucket=self.bucket, Key=self.key, **byte_range, **condition)


class _RangeRead:
    """One slice of memory being filled; a second try goes on where the first broke off."""

    def __init__(self, reader: S3Reader, start: int, out: memoryview, etag: str | None) -> None:
        self.reader, self.start, self.out, self.etag = reader, start, out, etag
        self.filled = 0

    def run(self) -> None:
        """Fill the slice."""
        with_retries(self._once, self.reader.connection.rounds)

    def _once(self) -> None:
        stop = self.start + len(self.out)
        first = self.start + self.filled
        with s3_errors(self.reader.where):
            try:
                response = self.reader._request({"Range": f"bytes={first}-{stop - 1}"}, self.etag)
            except self.reader.connection.client.exceptions.ClientError as error:
                if error.response["ResponseMetadata"]["HTTPStatusCode"] != 416:
                    raise
                raise ends_early(self.reader.where, stop, self.reader.head()["ContentLength"]) from None
            self.etag = response["ETag"]
            with closing(response["Body"]) as body:
                self._check_offer(response, first)
                self._drain(body)

    def _check_offer(self, response: dict[str, Any], first: int) -> None:
        _check_range_kept(response, self.reader.where, f"bytes={first}-")
        if response["ContentLength"] < len(self.out) - self.filled:
            raise ends_early(self.reader.where, self.start + len(self.out), first + response["ContentLength"])

    def _drain(self, body: Any) -> None:
        bandwidth = self.reader.connection.bandwidth
        while self.filled < len(self.out):
            stop = len(self.out) if bandwidth is None else min(self.filled + READ_BYTES, len(self.out))
            count = body.readinto(self.out[self.filled : stop])
            if count == 0:
                return
            self.filled += count
            if bandwidth is not None:
                bandwidth.take(count)


def _check_range_kept(response: dict[str, Any], where: str, wanted: str) -> None:
    """Some servers answer a ranged request with the whole object, whose first bytes are the wrong ones."""
    offered = str(response.get("ContentRange"))
    if offered.partition("-")[0] != wanted.partition("-")[0].replace("=", " "):
        raise StorageError("the store ignores byte ranges", where=where, got=offered, wanted=wanted)

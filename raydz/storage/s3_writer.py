"""Writing to S3: a small body in one put, a large one as a multipart upload straight from memory.

Neighbours: called by `s3.S3Store.put` and `writer`; requests go through `s3_client.S3Connection`. See the notes
"Parts" and "A lost answer" in README.md.
"""

from __future__ import annotations

import threading
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from types import TracebackType
from typing import Any

from raydz import log
from raydz.errors import StorageError
from raydz.storage.options import MIB, S3Options
from raydz.storage.retry import with_retries
from raydz.storage.s3_body import as_body
from raydz.storage.s3_client import S3Connection
from raydz.storage.s3_errors import from_code, s3_errors
from raydz.storage.s3_put import S3Put, Written
from raydz.storage.store import Buffer, ObjectInfo, flat_view

MAX_PARTS = 10_000
MAX_PARTS_IN_FLIGHT = 4


def part_bytes_for(options: S3Options, expected_bytes: int | None) -> int:
    """Size of all parts but the last: between the bounds, small enough to keep every connection busy.

    A size that would need more than 9,000 of the 10,000 parts S3 allows exceeds the upper bound.
    """
    if expected_bytes is None:
        return options.part_bytes_max
    busy = -(-expected_bytes // (4 * options.concurrency))
    bounded = min(max(busy, options.part_bytes_min), options.part_bytes_max)
    needed = max(bounded, -(-expected_bytes // 9_000))
    return -(-needed // MIB) * MIB


class S3Writer:
    """An object in the making, see `store.Writer`.

    Memory: `min(concurrency, MAX_PARTS_IN_FLIGHT) + 1` parts, whatever the object's size; none of what `stays`.
    """

    def __init__(self, connection: S3Connection, bucket: str, key: str, expected_bytes: int | None) -> None:
        self._connection = connection
        self._put = S3Put(connection, bucket, key)
        self._part_bytes = part_bytes_for(connection.options, expected_bytes)
        self._upload: Upload | None = None
        self._buffer = bytearray()
        self._held = memoryview(b"")  # the end of what stays: a part's length at most, and never beside `_buffer`
        self.bytes_written = 0
        self.info: ObjectInfo | None = None

    def __enter__(self) -> S3Writer:
        return self

    def write(self, data: Buffer, *, stays: bool = False) -> None:
        """See `Writer.write`."""
        view = flat_view(data)
        self.bytes_written += len(view)
        if self._held:
            self._buffer += self._held
            self._held = memoryview(b"")
        if stays and not self._buffer:
            while len(view) > self._part_bytes:
                self._send(view[: self._part_bytes])
                view = view[self._part_bytes :]
            self._held = view
            return
        while len(view):
            # A full buffer waits for the next byte: only then is it certain not to be the whole object.
            if len(self._buffer) == self._part_bytes:
                self._send(self._buffer)
                self._buffer.clear()
            count = min(len(view), self._part_bytes - len(self._buffer))
            self._buffer += view[:count]
            view = view[count:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._upload is None:
            if error is None:
                self.info = self._put.run(self._held or self._buffer)
            return
        try:
            if error is None:
                self._send(self._held or self._buffer)
                self.info = self._upload.complete()
        finally:
            self._upload.close()

    def _send(self, part: bytearray | memoryview) -> None:
        if self._upload is None:
            self._upload = Upload(self._connection, self._put)
        self._upload.send(part)


class Upload:
    """A multipart upload under way: parts in flight, their receipts, and the end of it, good or bad."""

    def __init__(self, connection: S3Connection, put: S3Put) -> None:
        self._connection, self._put = connection, put
        threads = min(connection.options.concurrency, MAX_PARTS_IN_FLIGHT)
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="raydz-s3-write")
        self._cancelled = threading.Event()
        self._parts: list[Future[dict[str, Any]]] = []
        self._sizes: list[int] = []
        self._slots = threading.Semaphore(threads)
        self._failure: BaseException | None = None
        self._is_complete = False
        self._id: str = with_retries(self._create, connection.rounds)

    def _create(self) -> str:
        checksum = self._connection.checksum
        if checksum is not None:
            chosen = {"ChecksumAlgorithm": checksum.name.upper(), "ChecksumType": "FULL_OBJECT"}
        else:
            chosen = {} if self._connection.options.checksum == "off" else {"ChecksumAlgorithm": "CRC32"}
        with s3_errors(self._put.where):
            answer = self._connection.client.create_multipart_upload(
                **self._put.target, **self._put.identity, **self._connection.encryption, **chosen
            )
        return answer["UploadId"]

    def send(self, buffer: bytearray | memoryview) -> None:
        """Upload the next part, from a copy of a bytearray; waits while too many are in flight."""
        if len(self._parts) == MAX_PARTS:
            raise StorageError(
                f"the object needs more than {MAX_PARTS} parts",
                where=self._put.where,
                got=f"parts of {self._sizes[0]} bytes",
                remedy="give the writer the right expected_bytes, or raise storage.part_bytes_max",
            )
        self._slots.acquire()
        if self._failure is not None:
            raise self._failure  # now, not after the last byte
        self._sizes.append(len(buffer))
        # boto3 shares bytes but would copy a bytearray once more.
        body = buffer if isinstance(buffer, memoryview) else bytes(buffer)
        self._parts.append(self._pool.submit(self._send_part, len(self._parts) + 1, body))

    def _send_part(self, number: int, body: bytes | memoryview) -> dict[str, Any]:
        try:
            checksum = self._connection.checksum
            crc = None if checksum is None else checksum.of(body)
            chosen = {} if checksum is None or crc is None else checksum.value(crc)
            answer = with_retries(
                lambda: self._send_once(number, body, chosen), self._connection.rounds, self._cancelled
            )
            receipts = {name: value for name, value in answer.items() if name.startswith("ChecksumCRC")}
            part = {"PartNumber": number, "ETag": answer["ETag"], **receipts, **chosen}
            return {"crc": crc, "part": part, "sum": zlib.crc32(body) if self._connection.reads_back else 0}
        except BaseException as error:
            self._failure = error
            raise
        finally:
            self._slots.release()

    def _send_once(self, number: int, body: bytes | memoryview, chosen: dict[str, str]) -> dict[str, Any]:
        with s3_errors(f"{self._put.where}, part {number}"):
            return self._connection.client.upload_part(
                **self._put.target, UploadId=self._id, PartNumber=number, Body=as_body(body), **chosen
            )

    def complete(self) -> ObjectInfo:
        """Wait for all parts, then make the object visible, checked as a whole by the store."""
        receipts = [part.result() for part in self._parts]
        chosen: dict[str, Any] = {}
        checksum = self._connection.checksum
        if checksum is not None:
            crc = receipts[0]["crc"]
            for receipt, size in zip(receipts[1:], self._sizes[1:], strict=True):
                crc = checksum.join(crc, receipt["crc"], size)
            chosen = {"ChecksumType": "FULL_OBJECT", **checksum.value(crc)}
        parts = {"Parts": [receipt["part"] for receipt in receipts]}
        etag = self._put.settle(lambda: self._complete_once(parts, chosen), refusals=("NoSuchUpload",))
        if etag is None:
            raise from_code("NoSuchUpload", self._put.where)
        self._is_complete = True
        if self._connection.reads_back:
            ends = accumulate(self._sizes)
            sums = [receipt["sum"] for receipt in receipts]
            parts_sent = [Written(end - n, end, crc) for end, n, crc in zip(ends, self._sizes, sums, strict=True)]
            self._put.read_back(etag, parts_sent, run=self._pool.map)
        return ObjectInfo(sum(self._sizes), etag)

    def _complete_once(self, parts: dict[str, Any], chosen: dict[str, Any]) -> dict[str, Any]:
        return self._connection.client.complete_multipart_upload(
            **self._put.target, UploadId=self._id, MultipartUpload=parts, MpuObjectSize=sum(self._sizes), **chosen
        )

    def close(self) -> None:
        """Stop the threads; abort the upload unless it was completed."""
        self._cancelled.set()
        # A part that arrives after the abort would stay behind, and be paid for.
        self._pool.shutdown(wait=True, cancel_futures=True)
        if self._is_complete:
            return
        try:
            with s3_errors(self._put.where):
                self._connection.client.abort_multipart_upload(**self._put.target, UploadId=self._id)
        except StorageError as error:
            log.get(__name__).warning("an unfinished upload stays behind until the next sweep: %s", error)

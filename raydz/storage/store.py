"""What every store promises: the protocol, its errors, and the rules for keys.

Neighbours: `raydz.storage.open_store` picks the implementation, `local.LocalStore` or `s3.S3Store`;
`checkpoint/` and `data/` see nothing but this protocol.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from raydz.errors import StorageError

Buffer = bytes | bytearray | memoryview
Names = list[str]  # inside the classes `list` is the method
Objects = list["StoredObject"]

MAX_KEY_BYTES = 1024
"""What S3 allows for prefix and key together."""

TEMP_PREFIX = ".raydz-tmp-"
"""Name of files that a local writer has not committed; no key may contain it, no list shows it."""


class AlreadyExists(StorageError):
    """A put with `if_absent` found the key taken: someone else was first."""


class NotFound(StorageError):
    """No object under this key."""


class ObjectChanged(StorageError):
    """The object is no longer the one whose etag the caller remembers."""


class StoreUnavailable(StorageError):
    """The store did not answer, throttled, or broke off in the middle; the same call may succeed later."""

    retryable = True


@dataclass(frozen=True)
class ObjectInfo:
    """Size and version of an object. The etag identifies this very version; it is not a hash of the content."""

    bytes: int
    etag: str


@dataclass(frozen=True)
class StoredObject:
    """One object of a listing. `modified` is Unix seconds by the store's clock."""

    key: str
    bytes: int
    modified: float


class Writer(Protocol):
    """A new object in the making: a context manager that commits at normal exit and vanishes on any exception."""

    bytes_written: int
    info: ObjectInfo | None
    """Known after the commit."""

    def write(self, data: Buffer, *, stays: bool = False) -> None:
        """Append bytes.

        Blocking: while more than the bounded number of parts is under way.
        Ownership: `data` may be reused as soon as this returns; with `stays` not before the commit or the exception,
            and then no copy of it is made.
        """
        ...

    def __enter__(self) -> Writer: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Store(Protocol):
    """Objects under one root (a folder, or a bucket and prefix), named by keys such as `step-10/rank0.bin`.

    Every method raises `StorageError`, `StoreUnavailable` among it when another try may succeed. Instances are
    safe to share between threads, to fork, and to pickle: they hold no connection and no credentials then.
    """

    uri: str

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Write a whole object: a reader sees the old one or the new one, never a part.

        Raises:
            AlreadyExists: `if_absent`, and the key is taken. Of racing callers exactly one is not told so.
        """
        ...

    def writer(self, key: str, expected_bytes: int | None = None) -> Writer:
        """Write an object piece by piece in bounded memory. `expected_bytes` (a good guess) sets the size of parts."""
        ...

    def get(self, key: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None) -> bytes:
        """Read bytes `start` to `stop`, cut at the object's end as Python's slices are.

        Raises:
            NotFound: no such key.
            ObjectChanged: `if_match` is not the object's etag.
        """
        ...

    def read_into(self, key: str, start: int, out: memoryview, *, if_match: str | None = None) -> None:
        """Fill all of `out` from byte `start` on, always from one version of the object.

        Raises:
            NotFound: no such key.
            ObjectChanged: `if_match` is not the etag, or the object was replaced during the read.
            StorageError: the object ends before `out` is full.
        """
        ...

    def head(self, key: str) -> ObjectInfo | None:
        """Size and etag, or None."""
        ...

    def exists(self, key: str) -> bool:
        """Whether the key can be read now."""
        ...

    def list(self, prefix: str = "") -> Names:
        """All keys that start with the string `prefix`, at any depth, sorted."""
        ...

    def list_objects(self, prefix: str = "") -> Objects:
        """As `list`, with sizes and times: one request for every thousand objects."""
        ...

    def list_folders(self, prefix: str = "") -> Names:
        """Names of the folders immediately in the folder `prefix` that hold at least one key, sorted."""
        ...

    def delete(self, keys: Iterable[str]) -> None:
        """Remove objects in no particular order; keys that are not there are no error."""
        ...

    def sweep(self, older_than_s: float) -> int:
        """Remove what killed writers left (temporary files, multipart uploads) and nobody can see; return how many.

        Ownership: `older_than_s` must exceed the longest save, or a living writer loses its work.
        """
        ...

    def probe_writable(self) -> Names:
        """Prove within seconds that this store can hold a run: put, read, refuse a second put, upload, delete.

        Returns:
            Weaknesses that a run can live with (names of `storage.probe`), each of them warned about; every process
            that writes passes them to `make_up_for`.

        Raises:
            StorageError: names the cause (path, bucket, credentials, endpoint, a store without conditional put).
        """
        ...

    def make_up_for(self, weaknesses: Iterable[str]) -> None:
        """From now on do with more requests what the store does not do: read back, look before a conditional put."""
        ...


def check_key(key: str, where: str) -> str:
    """The key itself, if it names an object below the root on every kind of store.

    Raises:
        StorageError: empty, absolute, with `..`, `.` or empty components, a NUL byte, or a reserved name.
    """
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\0" in key:
        raise StorageError(
            "not a key", where=where, got=repr(key), wanted="names joined by single slashes, without '.' and '..'"
        )
    if any(part.startswith(TEMP_PREFIX) for part in parts):
        raise StorageError(
            "a reserved key", where=where, got=repr(key), wanted=f"no name that starts with {TEMP_PREFIX}"
        )
    if len(key.encode()) > MAX_KEY_BYTES:
        raise StorageError("the key is too long", where=where, got=f"{len(key.encode())} bytes", wanted=MAX_KEY_BYTES)
    return key


def check_prefix(prefix: str, where: str) -> str:
    """The prefix itself, if it is empty, a key, or a key with a slash at the end."""
    if prefix:
        check_key(prefix.removesuffix("/"), where)
    return prefix


def check_range(start: int | None, stop: int | None, where: str) -> tuple[int, int | None]:
    """A byte range with its start made explicit.

    Raises:
        StorageError: negative, or stops before it starts.
    """
    first = start or 0
    if first < 0 or (stop is not None and stop < first):
        raise StorageError("not a byte range", where=where, got=f"{start}..{stop}", wanted="0 <= start <= stop")
    return first, stop


def flat_view(data: Buffer) -> memoryview:
    """The bytes of any contiguous buffer, one-dimensional, without a copy."""
    view = memoryview(data)
    # memoryview.cast refuses shapes with a zero in them.
    return view.cast("B") if view.nbytes else memoryview(b"")


def ends_early(where: str, stop: int, size: int) -> StorageError:
    """The error of a read past the end of an object."""
    return StorageError(
        "the object is shorter than the range that was asked for",
        where=where,
        got=f"{size} bytes",
        wanted=f"at least {stop} bytes",
        remedy="the file was truncated or belongs to another save; verify the checkpoint it is part of",
    )

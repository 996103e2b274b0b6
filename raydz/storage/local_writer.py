"""How a file comes into being: temporary name, fsync, then one atomic step to its own name.

Neighbours: used by `local.LocalStore` for `put` and `writer`. See the note "Atomic on a file system" in README.md.
"""

from __future__ import annotations

import errno
import os
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

from raydz.errors import StorageError
from raydz.storage.direct import MIN_BYTES, DirectFile
from raydz.storage.store import TEMP_PREFIX, AlreadyExists, Buffer, ObjectInfo, flat_view

_REMEDIES = {
    errno.EACCES: "give the user of this process the right to it, or choose another path",
    errno.EPERM: "give the user of this process the right to it, or choose another path",
    errno.EROFS: "the file system is mounted read-only; choose another path",
    errno.ENOSPC: "free some space, or choose a path on a larger disk",
    errno.EDQUOT: "raise the quota, or choose another path",
    errno.ENOTDIR: "a component of the path is a file; choose another path",
    errno.EIO: "the disk or its controller reports a fault; look into the kernel's log",
    errno.EOPNOTSUPP: "this file system lacks an operation that atomic writes need (hard links); choose another",
}


class LocalWriter:
    """A file in the making, see `store.Writer`. With `if_absent` the commit fails when the name is taken."""

    def __init__(self, path: Path, *, if_absent: bool = False, expected_bytes: int | None = None) -> None:
        self._path, self._if_absent = path, if_absent
        self._is_large = (expected_bytes or 0) >= MIN_BYTES
        self._direct: DirectFile | None = None
        self._temp = path.with_name(TEMP_PREFIX + uuid.uuid4().hex)
        self._fd = -1
        self.bytes_written = 0
        self.info: ObjectInfo | None = None

    def __enter__(self) -> LocalWriter:
        with file_errors(self._path, "write"):
            self._fd = _create(self._temp)
            if self._is_large:
                self._direct = DirectFile(self._temp, self._fd)
        return self

    def write(self, data: Buffer, *, stays: bool = False) -> None:
        """See `Writer.write`."""
        view = flat_view(data)
        with file_errors(self._path, "write"):
            if self._direct is not None:
                self._direct.write(view)
                self.bytes_written += len(view)
                return
            while len(view):
                # A short write is legal, and is how a full disk first shows.
                count = os.write(self._fd, view)
                self.bytes_written += count
                view = view[count:]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                with file_errors(self._path, "write"):
                    self._commit()
        finally:
            if self._direct is not None:
                self._direct.close()
            os.close(self._fd)
            with suppress(OSError):  # after a rename there is nothing to remove
                self._temp.unlink()

    def _commit(self) -> None:
        if self._direct is not None:
            self._direct.finish()
        os.fsync(self._fd)
        if self._if_absent:
            self._link()
        else:
            os.replace(self._temp, self._path)
        _fsync_folder(self._path.parent)
        status = os.fstat(self._fd)
        self.info = ObjectInfo(status.st_size, file_etag(status))

    def _link(self) -> None:
        try:
            os.link(self._temp, self._path)
        except FileExistsError:
            raise AlreadyExists("the file exists", where=str(self._path), wanted="a path not yet taken") from None


def file_etag(status: os.stat_result) -> str:
    """What tells this version of a file from the one that replaces it.

    A committed file is never written again, only replaced, and a replacement has another inode or time.
    """
    return f"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"


@contextmanager
def file_errors(path: Path, action: str) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` that names path, errno and remedy."""
    try:
        yield
    except OSError as error:
        code = error.errno or 0
        raise StorageError(
            f"cannot {action} this path",
            where=str(path),
            got=f"{errno.errorcode.get(code, code)}: {error.strerror or error}",
            remedy=_REMEDIES.get(code),
        ) from error


_CREATE_S = 5.0


def _create(temp: Path) -> int:
    deadline = time.monotonic() + _CREATE_S
    while time.monotonic() < deadline:
        # A delete in another process may prune an empty folder between any two of these calls.
        with suppress(FileNotFoundError):
            _make_folder(temp.parent)
            return os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    raise FileNotFoundError(errno.ENOENT, "the folder is removed each time it is made", str(temp.parent))


def _make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    with suppress(FileExistsError):
        folder.mkdir()
    _fsync_folder(folder.parent)


def _fsync_folder(folder: Path) -> None:
    """Make names in a folder durable; without it a power cut may forget a file whose content is safe."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems have no fsync for folders: names are durable there
            raise
    finally:
        os.close(fd)

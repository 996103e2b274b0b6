"""A store in a folder of a local or shared file system.

Neighbours: opened by `raydz.storage.open_store`; files are made by `local_writer.LocalWriter`; the promises are
those of `store.Store`.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from raydz.storage.local_writer import LocalWriter, file_errors, file_etag
from raydz.storage.probe import probe
from raydz.storage.store import (
    TEMP_PREFIX,
    Buffer,
    Names,
    NotFound,
    ObjectChanged,
    ObjectInfo,
    Objects,
    StoredObject,
    check_key,
    check_prefix,
    check_range,
    ends_early,
    flat_view,
)


class LocalStore:
    """Keys are paths below `root`, which is created by the first write."""

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root).expanduser().absolute()
        self.uri = str(self.root)

    def __repr__(self) -> str:
        return f"LocalStore({self.uri!r})"

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """See `Store.put`."""
        with LocalWriter(self._path(key), if_absent=if_absent, expected_bytes=flat_view(data).nbytes) as out:
            out.write(data)

    def writer(self, key: str, expected_bytes: int | None = None) -> LocalWriter:
        """See `Store.writer`."""
        return LocalWriter(self._path(key), expected_bytes=expected_bytes)

    def get(self, key: str, start: int | None = None, stop: int | None = None, *, if_match: str | None = None) -> bytes:
        """See `Store.get`."""
        path = self._path(key)
        first, stop = check_range(start, stop, str(path))
        with file_errors(path, "read"), _OpenObject(path, if_match) as source:
            end = source.info.bytes if stop is None else min(stop, source.info.bytes)
            body = bytearray(max(0, end - first))
            source.read_into(first, memoryview(body))
        return bytes(body)

    def read_into(self, key: str, start: int, out: memoryview, *, if_match: str | None = None) -> None:
        """See `Store.read_into`."""
        path = self._path(key)
        check_range(start, None, str(path))
        with file_errors(path, "read"), _OpenObject(path, if_match) as source:
            source.read_into(start, flat_view(out))

    def head(self, key: str) -> ObjectInfo | None:
        """See `Store.head`."""
        path = self._path(key)
        with file_errors(path, "look at"):
            try:
                status = path.stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
        return _info(status) if stat.S_ISREG(status.st_mode) else None

    def exists(self, key: str) -> bool:
        """See `Store.exists`."""
        return self.head(key) is not None

    def list(self, prefix: str = "") -> Names:
        """See `Store.list`."""
        check_prefix(prefix, self.uri)
        # Only the folder part of the prefix can be looked up; the rest is compared.
        folder = self.root / prefix.rpartition("/")[0]
        with file_errors(folder, "list"):
            return sorted(key for key in self._keys_below(folder) if key.startswith(prefix))

    def list_objects(self, prefix: str = "") -> Objects:
        """See `Store.list_objects`; the time is that of the last write."""
        found = []
        for key in self.list(prefix):
            with file_errors(self.root / key, "look at"), suppress(FileNotFoundError, NotADirectoryError):
                status = (self.root / key).stat()  # unless it was deleted since it was listed
                found.append(StoredObject(key, status.st_size, status.st_mtime))
        return found

    def list_folders(self, prefix: str = "") -> Names:
        """See `Store.list_folders`."""
        folder = self.root / check_prefix(prefix, self.uri)
        with file_errors(folder, "list"):
            try:
                names = [entry.name for entry in os.scandir(folder) if entry.is_dir()]
            except (FileNotFoundError, NotADirectoryError):
                return []
            # An empty folder is no folder: on S3 it could not exist.
            return sorted(name for name in names if any(True for _ in self._keys_below(folder / name)))

    def delete(self, keys: Iterable[str]) -> None:
        """See `Store.delete`."""
        for key in keys:
            path = self._path(key)
            with file_errors(path, "delete"):
                with suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                self._prune(path.parent)

    def sweep(self, older_than_s: float) -> int:
        """See `Store.sweep`; a file's age counts from its last write."""
        removed, oldest = 0, time.time() - older_than_s
        with file_errors(self.root, "sweep"):
            for path in _files_below(self.root):
                if path.name.startswith(TEMP_PREFIX) and path.stat().st_mtime <= oldest:
                    path.unlink(missing_ok=True)
                    self._prune(path.parent)
                    removed += 1
        return removed

    def probe_writable(self) -> Names:
        """See `Store.probe_writable`; a file system has no weakness that is not refused."""
        probe(self)
        return []

    def make_up_for(self, weaknesses: Iterable[str]) -> None:
        """See `Store.make_up_for`: there is nothing to make up for."""

    def _path(self, key: str) -> Path:
        return self.root / check_key(key, self.uri)

    def _keys_below(self, folder: Path) -> Iterator[str]:
        for path in _files_below(folder):
            if not path.name.startswith(TEMP_PREFIX):
                yield path.relative_to(self.root).as_posix()

    def _prune(self, folder: Path) -> None:
        while folder != self.root:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or someone else was faster: both are fine
            folder = folder.parent


class _OpenObject:
    """A file opened for reading: all bytes come from the version that `info` describes."""

    def __init__(self, path: Path, if_match: str | None) -> None:
        self._path, self._if_match = path, if_match

    def __enter__(self) -> _OpenObject:
        try:
            self._fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            raise NotFound("no such file", where=str(self._path)) from None
        try:
            self._check()
        except BaseException:
            os.close(self._fd)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _check(self) -> None:
        status = os.fstat(self._fd)
        if not stat.S_ISREG(status.st_mode):
            raise NotFound("not a file", where=str(self._path))
        self.info = _info(status)
        if self._if_match not in (None, self.info.etag):
            raise ObjectChanged(
                "the file was replaced", where=str(self._path), got=self.info.etag, wanted=self._if_match
            )

    def read_into(self, start: int, out: memoryview) -> None:
        filled = 0
        while filled < len(out):
            count = os.preadv(self._fd, [out[filled:]], start + filled)
            if count == 0:
                raise ends_early(str(self._path), start + len(out), os.fstat(self._fd).st_size)
            filled += count


def _info(status: os.stat_result) -> ObjectInfo:
    return ObjectInfo(status.st_size, file_etag(status))


def _files_below(folder: Path) -> Iterator[Path]:
    def refuse(error: OSError) -> None:
        if not isinstance(error, (FileNotFoundError, NotADirectoryError)):
            raise error  # os.walk would skip an unreadable folder without a word

    for base, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            yield Path(base, name)

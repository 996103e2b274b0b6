"""A folder that is built once, whoever asks first, and is either complete or not there.

Layer 4, used by prepare. Two guards: a file lock, so that processes of one host wait instead of doing the work twice;
and a rename at the end, so that a killed builder leaves nothing that looks finished, even where locks of several hosts
don't reach each other (some NFS).
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

from raydz.errors import StorageError
from raydz.log import get

_log = get(__name__)


def build_once(cache_dir: Path, key: str, build: Callable[[Path], None]) -> Path:
    """Return `cache_dir/key`, calling `build(folder)` first if it is not there.

    `build` fills an empty folder, which becomes `cache_dir/key` when it returns; when it raises, nothing stays.
    Blocking: waits while another process of this host builds the same key.

    Raises:
        StorageError: the folder cannot be written. And what `build` raises.
    """
    final = cache_dir / key
    if final.is_dir():
        return final
    with _storage_errors(cache_dir):
        cache_dir.mkdir(parents=True, exist_ok=True)
        with _locked(cache_dir / f".{key}.lock"):
            if not final.is_dir():
                _remove_leftovers(cache_dir, key)
                _build(final, build)
    return final


def _build(final: Path, build: Callable[[Path], None]) -> None:
    temporary = final.with_name(f"{_temporary_prefix(final.name)}{os.getpid()}-{os.urandom(4).hex()}")
    temporary.mkdir()
    try:
        build(temporary)
        _sync_tree(temporary)
        _publish(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, final: Path) -> None:
    try:
        os.rename(temporary, final)
    except OSError:
        # rename refuses a folder that is not empty: another host won the race, and its result is as good.
        if not final.is_dir():
            raise
        _log.info("%s was built by another process in the meantime", final)
    _sync(final.parent)


def _temporary_prefix(key: str) -> str:
    return f".{key}.{socket.gethostname()}-"


def _remove_leftovers(cache_dir: Path, key: str) -> None:
    """Remove what killed builders of this host left. We hold the lock, so none of them is alive."""
    for path in cache_dir.glob(f"{_temporary_prefix(key)}*"):
        _log.info("removing %s, left by a process that was killed", path)
        shutil.rmtree(path, ignore_errors=True)


def _sync_tree(folder: Path) -> None:
    """Bring files to the disk before the rename, so that a power cut cannot leave a complete name on empty files."""
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, which the kernel drops when the process dies.

    The file stays: if it were removed, two processes could each lock a file of that name.
    """
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _storage_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StorageError(
            "the data cache cannot be written",
            where=str(error.filename or cache_dir),
            got=error.strerror or str(error),
            remedy="set data.cache_dir to a folder with room that this process may write",
        ) from error

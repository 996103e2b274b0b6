"""A rank's own folder on a disk that others use, too: never shared, gone when its owner is. Layer 3.

Above: `nvme.py`. README.md, "Folders".
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from raydz import log
from raydz.errors import OffloadError
from raydz.offload.aio import SwapFile, failure

_LOCK = "lock"
_GATE_S = 120.0
_live: weakref.WeakSet[SwapFolder] = weakref.WeakSet()
_forks_are_watched = False


class SwapFolder:
    """`<root>/raydz/<run>/rank<r>-<random>`: made anew for each owner, so that two of them never meet.

    Its lock is held for the owner's life and let go by the kernel, however the owner ends. Folders without a holder are
    removed when the next owner comes.

    Args:
        root: `nvme_path`.
        run: what people find it by; made a single folder name.

    Raises:
        OffloadError: it cannot be made there.
    """

    def __init__(self, root: str, run: str = "run", rank: int = 0) -> None:
        top = Path(root).expanduser().absolute() / "raydz"
        name = "".join(c if c.isalnum() or c in "-_." else "-" for c in run).strip(".") or "run"
        self.path = top / name / f"rank{rank}-{secrets.token_hex(4)}"
        try:
            top.mkdir(parents=True, exist_ok=True)
            with _gate(top):
                _sweep(top)
                self.path.mkdir(parents=True)
                lock = _locked(self.path / _LOCK)
        except OSError as error:
            raise failure(error.errno or errno.EIO, "making a folder", str(self.path)) from error
        assert lock is not None
        self._lock: int = lock
        owner = json.dumps({"pid": os.getpid(), "host": socket.gethostname(), "run": run, "rank": rank})
        os.write(self._lock, owner.encode() + b"\n")
        self._remove = weakref.finalize(self, _remove, self.path, self._lock, os.getpid())
        _watch_forks(self)

    def create(self, name: str) -> SwapFile:
        """A file in it that has no name any more: its space is free again the moment it is closed or its owner dies.

        Raises:
            OffloadError: it cannot be made.
        """
        file = SwapFile(str(self.path / name))
        os.unlink(file.path)
        return file

    def close(self) -> None:
        """Remove it. Files of it must be closed before. At the process's end it is done without a call."""
        self._remove()

    def forget_lock(self) -> None:
        """In a child of a fork: the lock is the parent's alone."""
        os.close(self._lock)


def _remove(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        gate = _locked(path.parents[1] / ".lock")
        if gate is not None:  # else whoever has it sweeps
            _remove_empty(path.parent)
            os.close(gate)
    os.close(lock)


def _sweep(top: Path) -> None:
    """Remove folders whose owners are gone. Only behind the gate: a folder and its lock appear together there."""
    for path in sorted(top.glob("*/rank*")):
        with suppress(OSError):  # another user's, or its owner is removing it now
            lock = _locked(path / _LOCK)
            if lock is None:
                continue
            log.get(__name__).warning("removing what a dead process left in %s", path)
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)
    for path in top.iterdir():
        _remove_empty(path)


def _remove_empty(folder: Path) -> None:
    with suppress(OSError):  # something is in it
        folder.rmdir()


def _locked(path: Path) -> int | None:
    """A descriptor that holds the file's lock until it is closed; None: another one holds it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return None
        raise
    return descriptor


@contextmanager
def _gate(top: Path) -> Iterator[None]:
    """One process at a time makes and sweeps folders."""
    deadline = time.monotonic() + _GATE_S
    while (gate := _locked(top / ".lock")) is None:
        if time.monotonic() > deadline:
            raise OffloadError(
                "another process has been making folders for too long",
                where=str(top / ".lock"),
                got=f"locked for {_GATE_S:g} s",
                remedy="end the process that holds it (fuser), or set nvme_path to another folder",
            )
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(gate)


def _watch_forks(folder: SwapFolder) -> None:
    global _forks_are_watched
    _live.add(folder)
    if not _forks_are_watched:
        os.register_at_fork(after_in_child=_forget_locks)
        _forks_are_watched = True


def _forget_locks() -> None:
    for folder in list(_live):
        folder.forget_lock()
    _live.clear()

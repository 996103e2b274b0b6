"""Append-only files of JSON objects, one a line, that survive being killed in mid-write.

Layer 3. Below `tracking.journal` (steps) and `tracking.tracker` (events). A line is one `write` to a file opened for
append: a killed process leaves at most one torn line at the end, which the next `LineFile` cuts off. Lines reach the
operating system at once and the disk when it likes: a killed process loses nothing, a power cut the last seconds.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from raydz.errors import StorageError

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


@contextmanager
def storage_errors(path: Path, what: str) -> Iterator[None]:
    """Turn an `OSError` into a `StorageError` that names the file and the cause."""
    try:
        yield
    except OSError as error:
        raise StorageError(
            what,
            where=str(path),
            got=error.strerror or str(error),
            wanted="a writable local file",
            remedy="free space or permissions there, or another run.root",
        ) from error


def encode(record: dict[str, Any]) -> bytes:
    """One line; numbers that JSON lacks become the strings "nan", "inf" and "-inf"."""
    text = json.dumps(_spell(record), separators=(",", ":"), allow_nan=False)
    return text.encode() + b"\n"


def decode(line: bytes) -> dict[str, Any] | None:
    """The object of a line, with "nan", "inf", "-inf" as numbers again; None if it is not a complete line."""
    if not line.endswith(b"\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict):
        return None
    return _unspell(record)


def _spell(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _spell(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_spell(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")
    return value


def _unspell(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _unspell(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_unspell(item) for item in value]
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


class LineFile:
    """A file of lines, open for append.

    Ownership: one writer a file, whose threads may append at the same time. Creates the folder. Cuts a torn last line
    off when it opens.

    Raises:
        StorageError: the folder or file cannot be created or written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        with storage_errors(path, "cannot open the file for append"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            self._size = _end_of_last_line(self._fd)
            os.ftruncate(self._fd, self._size)

    def append(self, record: dict[str, Any]) -> None:
        """Write one line, whole or not at all.

        Raises:
            StorageError: it could not be written whole; the file is as it was before.
        """
        line = encode(record)
        with self._lock, storage_errors(self.path, "cannot append a line"):
            try:
                written = os.write(self._fd, line)
                if written < len(line):
                    raise OSError(0, f"disk full: {written} of {len(line)} bytes written")
            except OSError:
                os.ftruncate(self._fd, self._size)
                raise
            self._size += len(line)

    def close(self) -> None:
        """Force what was written to the disk and close. A second call does nothing."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        with storage_errors(self.path, "cannot close the file"):
            try:
                os.fsync(fd)
            finally:
                os.close(fd)


def _end_of_last_line(fd: int, block_bytes: int = 1 << 16) -> int:
    """Offset behind the last newline; 0 if there is none."""
    end = os.fstat(fd).st_size
    while end > 0:
        start = max(0, end - block_bytes)
        newline = os.pread(fd, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file in order; lines that are torn or damaged are left out. A missing file has none.

    Raises:
        StorageError: the file is there and cannot be read.
    """
    if not path.exists():
        return
    with storage_errors(path, "cannot read the file"), path.open("rb") as file:
        for line in file:
            record = decode(line)
            if record is not None:
                yield record

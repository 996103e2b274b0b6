"""The journal: one line a step on local disk, written before anything else hears of the step.

Layer 3. `tracking.tracker` appends, `tracking.publisher` tails it with `JournalTail` and carries the lines to MLflow;
`raydz report` reads it with `read`. Format of a line: {"step": n, "time": unix seconds, <metrics>, "attempt": k};
`tracking.lines` says how it survives a kill and how nan and inf are spelled.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from raydz import log
from raydz.tracking.lines import LineFile, decode, read_lines, storage_errors

_log = log.get(__name__)


class Point(NamedTuple):
    """All metrics of one step, as a sink takes them."""

    step: int
    time_ms: int
    metrics: dict[str, float]


class Journal:
    """The journal of a run, open for append by its one writer: rank 0."""

    def __init__(self, file: LineFile, attempt: int, last_step: int) -> None:
        self._file, self._attempt, self.last_step = file, attempt, last_step
        self.path = file.path

    @classmethod
    def open(cls, path: str | Path, resume_step: int, attempt: int) -> Journal:
        """Open at the step that training resumes from, so that each step will be there once.

        Lines of later steps, which will be computed again, move to `journal.discarded-<attempt>.jsonl` beside it, and
        so do damaged lines; a torn last line is dropped. A crash in between leaves either the old or the new journal.

        Args:
            resume_step: last step of the checkpoint that was loaded; 0 for a new run.
            attempt: how often the run was restarted.

        Raises:
            StorageError: the folder or file cannot be created, read or written.
        """
        path = Path(path)
        file = LineFile(path)
        moved, last_step = _rewind(path, resume_step, path.with_name(f"{path.stem}.discarded-{attempt}.jsonl"))
        if moved:
            _log.info("%d journal lines after step %d set aside", moved, resume_step)
            file.close()
            file = LineFile(path)
        return cls(file, attempt, max(last_step, resume_step))

    def append(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step: one write, handed to the operating system before the call returns.

        Raises:
            StorageError: it could not be written; the journal is as before and the step may be tried again.
            ValueError: the step is not after the last one.
        """
        if step <= self.last_step:
            raise ValueError(f"step {step} after step {self.last_step}: a step has one line in the journal")
        numbers = {name: value if isinstance(value, int) else float(value) for name, value in metrics.items()}
        self._file.append({"step": step, "time": round(time.time(), 3), **numbers, "attempt": self._attempt})
        self.last_step = step

    def close(self) -> None:
        """Force the lines to the disk and close."""
        self._file.close()


def read(path: str | Path) -> list[dict[str, Any]]:
    """All complete lines in order, nan and inf as numbers; an absent journal is empty.

    Raises:
        StorageError: the file is there and cannot be read.
    """
    return list(read_lines(Path(path)))


def to_point(record: Mapping[str, Any]) -> Point:
    """A line as a sink takes it."""
    metrics = {k: float(v) for k, v in record.items() if k not in ("step", "time") and isinstance(v, (int, float))}
    return Point(int(record["step"]), int(float(record["time"]) * 1000), metrics)


class JournalTail:
    """Reads what was appended since `offset`, while another thread appends.

    The reader moves `offset` itself once the points are safe elsewhere; until then `read` gives them again.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.offset = path, 0

    def read(self, max_points: int, after_step: int) -> tuple[list[Point], int]:
        """Up to `max_points` points with a step above `after_step`, and the offset behind them."""
        points: list[Point] = []
        with self.path.open("rb") as file:
            file.seek(self.offset)
            end = self.offset
            while len(points) < max_points and (line := file.readline()).endswith(b"\n"):
                end += len(line)
                record = _decode_step(line)
                if record is not None and record["step"] > after_step:
                    points.append(to_point(record))
        return points, end

    def count(self, after_step: int) -> int:
        """How many points `read` has still to give."""
        with self.path.open("rb") as file:
            file.seek(self.offset)
            records = (_decode_step(line) for line in file)
            return sum(record is not None and record["step"] > after_step for record in records)


def _decode_step(line: bytes) -> dict[str, Any] | None:
    record = decode(line)
    if record is None or not isinstance(record.get("step"), int) or not isinstance(record.get("time"), (int, float)):
        return None
    return record


def _rewind(path: Path, resume_step: int, discarded_path: Path) -> tuple[int, int]:
    """Keep the lines up to `resume_step`, each step once. Returns how many were set aside, and the last step kept."""
    temporary = path.with_name(path.name + ".tmp")
    discarded: list[bytes] = []
    last_step = 0
    with storage_errors(path, "cannot rewind the journal"):
        with path.open("rb") as source, temporary.open("wb") as kept:
            for line in source:
                record = _decode_step(line)
                if record is not None and last_step < record["step"] <= resume_step:
                    kept.write(line)
                    last_step = record["step"]
                else:
                    discarded.append(line)
            _sync(kept)
        if discarded:  # first the copy, then the cut: a crash between them loses nothing
            _set_aside(discarded, discarded_path)
            os.replace(temporary, path)
        else:
            temporary.unlink()
    return len(discarded), last_step


def _set_aside(lines: list[bytes], path: Path) -> None:
    """Add lines to a file in one atomic step. An attempt number that comes again must not overwrite the older lines."""
    old = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    known = set(old)
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("wb") as file:
        file.writelines(old + [line for line in lines if line not in known])
        _sync(file)
    os.replace(temporary, path)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())

"""What a rank has asked of a process group so far, as a hash and a short memory: so that ranks can compare.

Neighbours: `collectives.py` notes every launch; the hash rides on the step's norm (`zero/update.py`), before anything
is committed; `monitor.py` compares the memories when a collective is overdue.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass

_REMEMBERED = 64


@dataclass(frozen=True)
class Entry:
    """One launch: its number, what it is, and for what (a unit, a flat group)."""

    number: int
    what: str

    def __str__(self) -> str:
        return f"#{self.number} {self.what}"


class SequenceLog:
    """Launches of one process group on one rank. Equal hashes mean equal sequences (but for one chance in 2**32)."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.count = 0
        self._hash = 0
        self._recent: deque[Entry] = deque(maxlen=_REMEMBERED)

    def note(self, what: str) -> None:
        """A collective is about to be launched."""
        self.count += 1
        self._hash = zlib.crc32(what.encode(), self._hash)
        self._recent.append(Entry(self.count, what))

    @property
    def digest(self) -> float:
        """The hash as an exact float, so that it can travel with other figures."""
        return float(self._hash)

    def recent(self) -> list[tuple[int, str]]:
        """The last launches, oldest first."""
        return [(entry.number, entry.what) for entry in tuple(self._recent)]


def first_difference(logs: list[list[tuple[int, str]]]) -> tuple[int, list[str]] | None:
    """Number of the first launch that is not the same on all ranks, and what each did there; None if they agree.

    Only numbers that all logs still remember, or have not reached, are compared; a rank that has not reached the
    number is said to have done nothing yet only if the others differ before it.

    Args:
        logs: `SequenceLog.recent()` of every rank, in rank order.
    """
    by_number = [dict(log) for log in logs]
    reached = min((max(log, default=0) for log in by_number), default=0)
    remembered = max((min(log) for log in by_number if log), default=1)
    for number in range(remembered, reached + 1):
        done = [log.get(number, "nothing") for log in by_number]
        if len(set(done)) > 1:
            return number, done
    return None

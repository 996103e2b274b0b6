"""The order in which units were used, as a hint for gathering ahead. A wrong hint costs time, never correctness.

Neighbours: `sharded.py` asks what comes next. Pure bookkeeping: the same on every rank that makes the same calls, and
never a function of timing or free memory.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from itertools import chain, islice
from typing import Generic, TypeVar

T = TypeVar("T")


class Pass(Enum):
    """What a sequence of gathers serves; each kind has its own history."""

    FORWARD = "forward"
    BACKWARD = "backward"
    EVALUATE = "evaluate"


class UseOrder(Generic[T]):
    """Records each pass, and answers from the last complete pass of the same kind."""

    def __init__(self) -> None:
        self._history: dict[Pass, list[T]] = {}
        self._record: list[T] = []
        self._kind: Pass | None = None
        self._position = 0

    def begin(self, kind: Pass) -> None:
        """A pass starts; what was recorded since the last start becomes the history of its kind."""
        if self._kind is not None and self._record:
            self._history[self._kind] = self._record
        self._kind, self._record, self._position = kind, [], 0

    def advance(self, item: T) -> list[T]:
        """Note a use of `item` and return what followed it in the last pass (empty if it was not expected)."""
        self._record.append(item)
        history = self._history.get(self._kind, []) if self._kind else []
        try:
            self._position = history.index(item, self._position) + 1
        except ValueError:
            return []
        return history[self._position :]

    def distance(self, item: T, size: Callable[[T], int], most: int) -> int | None:
        """Sizes of what was used between here and the next use of `item`, in this pass and the backward after it.

        None where no use of it is known within `most`. Repeated uses of another item count each time.
        """
        history = self._history.get(self._kind, []) if self._kind else []
        total = 0
        for other in chain(islice(history, self._position, None), self._history.get(Pass.BACKWARD, [])):
            if other == item:
                return total
            total += size(other)
            if total > most:
                break
        return None

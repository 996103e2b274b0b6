"""The order in which units were used, as a hint for gathering ahead. A wrong hint costs time, never correctness.

Neighbours: `sharded.py` asks what comes next. Pure bookkeeping: the same on every rank that makes the same calls, and
never a function of timing or free memory.
"""

from __future__ import annotations

from enum import Enum
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

    def is_last(self, item: T) -> bool:
        """Whether the last pass of this kind ended with `item`."""
        history = self._history.get(self._kind, []) if self._kind else []
        return bool(history) and history[-1] == item

"""The rounds of an attempt: the rank processes of all workers are started anew together, the workers stay.

Neighbours: the board holds a `Rounds`; `supervisor.py` follows its `View`s, `referee.py` (in the driver) begins the
next round or ends the attempt. Pure, and free of torch and ray. See README.md, "In place".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


@dataclass(frozen=True)
class Order:
    """What a round's rank processes are told beside their task; round 0 has it in the task.

    Args:
        number: of the round within its attempt, from 0.
        failures: of the run before it.
        skips: steps whose batches are left out.
        before_step: checkpoints of this step and later are damaged.
        interruption: fields of a `train.recovery.Interruption`; None: nothing failed.
    """

    number: int = 0
    failures: int = 0
    skips: frozenset[int] = frozenset()
    before_step: int | None = None
    interruption: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Report:
    """What ended a rank's process, as its supervisor saw or heard it.

    Args:
        kind: `killed`, `out of memory`, or `raised`.
        cause: one line for people.
        error: the typed error it raised, pickled: unpickling may import torch, which supervisors do not.
        is_echo: it raised what a rank raises whose peer has gone; the peer's report tells more.
    """

    rank: int
    kind: Literal["killed", "out of memory", "raised"]
    cause: str
    error: bytes | None = None
    is_echo: bool = False


@dataclass(frozen=True)
class View:
    """What supervisors act on. `version` grows with every change.

    Args:
        store: host and port where the round's processes meet, once rank 0's process has opened it.
        end: the attempt is over: all ranks are done, or the driver gave it up.
        vaults: of each node, if snapshots are kept there, too; None: the driver has not said so far.
        roll: number of the roll call that every supervisor answers.
    """

    version: int = 1
    order: Order = Order()
    store: tuple[str, int] | None = None
    end: Literal["finished", "given up"] | None = None
    reason: str = ""
    vaults: Mapping[str, Any] | None = None
    roll: int = 0


class Rounds:
    """State of one attempt.

    Attributes:
        nodes: of each rank whose supervisor has come.
        present: ranks whose supervisors have answered the newest roll call.
    """

    def __init__(self) -> None:
        self.view = View()
        self.reports: list[Report] = []
        self.nodes: dict[int, str] = {}
        self.present: set[int] = set()
        self._done: set[int] = set()

    @property
    def number(self) -> int:
        """Of the round that is under way."""
        return self.view.order.number

    def use_vaults(self, vaults: Mapping[str, Any]) -> None:
        """Snapshots are kept there, too."""
        self._change(vaults=vaults)

    def call_roll(self) -> None:
        """Ask all supervisors whether they are there."""
        self.present = set()
        self._change(roll=self.view.roll + 1)

    def answer_roll(self, rank: int, roll: int) -> None:
        """A supervisor is there; an answer to an earlier call: no effect."""
        if roll == self.view.roll:
            self.present.add(rank)

    def announce_store(self, number: int, host: str, port: int) -> None:
        """Rank 0's process of round `number` waits for the others there; of an earlier round: no effect."""
        if self._is_under_way(number):
            self._change(store=(host, port))

    def report(self, number: int, report: Report) -> None:
        """A process of round `number` has ended, or will; of an earlier round: no effect."""
        if self._is_under_way(number):
            self.reports.append(report)

    def done(self, number: int, rank: int, world_size: int) -> None:
        """A rank has come to the end of its training; the attempt ends when all have."""
        if not self._is_under_way(number):
            return
        self._done.add(rank)
        if len(self._done) == world_size:
            self._change(end="finished")

    def begin(self, order: Order) -> bool:
        """All ranks start anew; False where the attempt is over, or another round than the one before is under way."""
        if self.view.end is not None or order.number != self.number + 1:
            return False
        self.reports, self._done = [], set()
        self._change(order=order, store=None)
        return True

    def give_up(self, reason: str) -> None:
        """End the attempt; its supervisors raise the reason."""
        if self.view.end is None:
            self._change(end="given up", reason=reason)

    def _is_under_way(self, number: int) -> bool:
        return self.view.end is None and number == self.number

    def _change(self, **fields: Any) -> None:
        self.view = replace(self.view, version=self.view.version + 1, **fields)


def most_telling(reports: list[Report]) -> Report:
    """The report that names the cause: the first that is no echo of another rank's end, else the first. Pure."""
    return next((report for report in reports if not report.is_echo), reports[0])

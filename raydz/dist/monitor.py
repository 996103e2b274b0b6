"""Watches for ranks that wait for each other in different collectives, and ends them with a named error.

Neighbours: `engine.py` starts one; `collectives.py` says what its rank waits for; `sequence.py` remembers what was
launched. Ranks talk through the job's store, which works while collectives do not. See "Divergence" in README.md.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from raydz import log
from raydz.dist.sequence import SequenceLog, first_difference
from raydz.errors import TrainingError
from raydz.exits import end_before_exit

_POLL_S = 1.0
_ANSWER_S = 5.0
EXIT_CODE = 70
_logger = log.get(__name__)
_monitors: weakref.WeakSet[DivergenceMonitor] = weakref.WeakSet()


@dataclass
class Waiting:
    """What this rank waits for now, and what it launched so far; shared by the communicators of an engine."""

    what: str | None = None
    since: float = 0.0
    calls: int = 0

    def begin(self, what: str) -> None:
        self.what, self.since = what, time.monotonic()

    def end(self) -> None:
        self.what = None


@dataclass(frozen=True)
class State:
    """One rank's answer: what it waits for (None: it computes), and its logs' last launches by name."""

    waits_for: str | None
    logs: dict[str, list[tuple[int, str]]]


def diagnose(states: Sequence[State | None]) -> TrainingError | None:
    """The error, if these ranks can never go on; None if one of them is only slow. Pure.

    Args:
        states: of all ranks, in order; None for one that did not answer.
    """
    answered = [state for state in states if state is not None]
    for name in answered[0].logs if answered else ():
        found = first_difference([state.logs.get(name, []) for state in answered])
        if found:
            return _diverged(f"launch {found[0]} of {name}", states, found[1])
    waits = [state.waits_for for state in answered]
    if len(answered) < len(states) or None in waits or len(set(waits)) == 1:
        return None
    return _diverged("waiting for each other", states, [str(wait) for wait in waits])


def _diverged(where: str, states: Sequence[State | None], does: list[str]) -> TrainingError:
    ranks = [rank for rank, state in enumerate(states) if state is not None]
    listed = "; ".join(f"rank {rank}: {what}" for rank, what in list(zip(ranks, does, strict=True))[:8])
    return TrainingError(
        "ranks do different things and would wait for each other for ever",
        where=where,
        got=listed,
        wanted="the same modules called in the same order on every rank, equally often",
        remedy="look for a branch, a batch count or an exception that depends on the rank",
    )


@dataclass
class _Signs:
    """Signs of life of this process that are no collectives."""

    count: int = 0
    num_excused: int = 0


_signs = _Signs()


def progressed() -> None:
    """Say that this rank is getting on: for work without collectives or steps, such as a batch of an evaluation."""
    _signs.count += 1


@contextmanager
def excused() -> Iterator[None]:
    """Count the body as getting on, however long it takes: for waits that have a time limit of their own."""
    _signs.num_excused += 1
    try:
        yield
    finally:
        _signs.num_excused -= 1


def activity() -> tuple[int, str | None]:
    """A number that grows while this process gets on, and the collective it waits in; None: it computes.

    It counts what all its engines launched, `progressed`, and the looks at it while it is `excused`.
    """
    if _signs.num_excused:
        _signs.count += 1
    waitings = [monitor._waiting for monitor in list(_monitors)]
    return _signs.count + sum(w.calls for w in waitings), next((w.what for w in waitings if w.what), None)


def print_and_exit(error: TrainingError) -> None:
    """The default end: a peer's exit wakes ranks that gloo would let wait, and torchrun ends the rest."""
    print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


_end: Callable[[TrainingError], None] = print_and_exit


def set_end(end: Callable[[TrainingError], None]) -> None:
    """What a process does when its monitor finds a divergence (a Ray worker tells the driver first)."""
    global _end
    _end = end


class DivergenceMonitor:
    """A thread of a rank that asks all ranks for their state when its own has waited for `limit_s`.

    Args:
        store: the job's, or None in a world of one (then nothing is watched).
        prefix: of its keys, the same on all ranks and of no other monitor.
    """

    def __init__(
        self, store: dist.Store | None, prefix: str, rank: int, world_size: int, *, limit_s: float, waiting: Waiting,
        logs: Sequence[SequenceLog],
    ) -> None:  # fmt: skip
        self._rank, self._world_size, self._limit_s = rank, world_size, limit_s
        self._waiting, self._logs = waiting, logs
        _monitors.add(self)
        self._answered = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        if store is not None and world_size > 1:
            # A connection of its own: a blocking call of the main thread must not hold it up.
            self._store = dist.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)
            self._thread = threading.Thread(target=self._watch, name="raydz-divergence", daemon=True)
            self._thread.start()
            end_before_exit(self.stop)

    def stop(self) -> None:
        """End the thread."""
        self._stopped.set()
        if self._thread is not None:
            self._thread.join(_ANSWER_S)

    def _watch(self) -> None:
        while not self._stopped.wait(_POLL_S):
            try:
                self._look()
            except RuntimeError as error:  # the store's host is gone: its process ends, and collectives fail with it
                _logger.debug("divergence monitor ends: %s", error)
                return

    def _look(self) -> None:
        asked = self._store.add("asked", 0)
        if asked > self._answered:
            self._answered = asked
            self._store.set(f"{asked}/{self._rank}", json.dumps(self._state()))
        what = self._waiting.what
        if what is not None and time.monotonic() - self._waiting.since > self._limit_s:
            self._ask()

    def _state(self) -> dict:
        return {"waits_for": self._waiting.what, "logs": {entry.name: entry.recent() for entry in self._logs}}

    def _ask(self) -> None:
        """One round of questions; ends the process if the answers say that nobody can go on."""
        number = self._store.add("asked", 1)
        self._answered = number
        self._store.set(f"{number}/{self._rank}", json.dumps(self._state()))
        deadline = time.monotonic() + _ANSWER_S
        states = [self._answer(f"{number}/{rank}", deadline) for rank in range(self._world_size)]
        error = diagnose(states)
        if error is not None and self._waiting.what is not None:
            _end(error)
        self._waiting.since = time.monotonic()  # somebody is only slow: ask again after another limit

    def _answer(self, key: str, deadline: float) -> State | None:
        while not self._store.check([key]):
            if time.monotonic() > deadline or self._stopped.wait(0.1):
                return None
        found = json.loads(self._store.get(key))
        return State(found["waits_for"], {n: [(int(a), b) for a, b in log] for n, log in found["logs"].items()})


def default_store() -> dist.Store | None:
    """The store of the default process group; None without one, or where torch only plays one (backend `fake`)."""
    if not dist.is_initialized() or dist.get_backend() == "fake":
        return None
    return dist.distributed_c10d._get_default_store()


__all__ = [
    "DivergenceMonitor",
    "State",
    "Waiting",
    "activity",
    "default_store",
    "diagnose",
    "excused",
    "progressed",
    "set_end",
]

"""Threads end before the interpreter does.

A daemon thread that is in C++ when the interpreter ends (torch, a kernel) comes back for the lock, Python (before 3.14)
unwinds it, and C++ answers with abort(): a run that is done ends with SIGABRT. So whoever starts such a thread says
here how it ends. Neighbours: threads of `dist`, `offload`, `checkpoint` and `hf`.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  registers its end first, so that ours comes before it
import threading
import weakref
from collections.abc import Callable

from raydz import log

JOIN_S = 5.0
"""For a thread that has little left to do; one that waits for a device or a peer that is stuck must hold up no exit."""
_ends: set[weakref.WeakMethod] = set()
_logger = log.get(__name__)


def end_before_exit(end: Callable[[], object]) -> None:
    """Call a bound method before the interpreter ends; its object may be gone by then.

    Args:
        end: ends its object's threads, within a time of its own; may be called when they have ended.
    """
    _ends.add(weakref.WeakMethod(end, _ends.discard))


def _end_all() -> None:
    for reference in list(_ends):
        end = reference()
        if end is None:
            continue
        try:
            end()
        except Exception as error:  # the others' threads must end, too
            _logger.error("at exit: %s: %s", type(error).__name__, error)


# `atexit` comes too late: executors take no more work by then, and a save in flight needs them.
threading._register_atexit(_end_all)  # type: ignore[attr-defined]

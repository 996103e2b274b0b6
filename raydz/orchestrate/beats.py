"""A worker's word once a second: it lives, which step it ended, what it waits for. One rank of a node posts for all.

Neighbours: `worker.py` starts one; `node_mail.py` carries beats within a node; `board.py` takes them; `watchdog.py`
judges by them. See README.md, "What the controller costs".
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType

from raydz.dist.monitor import activity
from raydz.orchestrate.board import Beat
from raydz.orchestrate.node_mail import NodeMail
from raydz.orchestrate.place import Place

_EVERY_S = 1.0
_FRESH_S = 2.5
"""A rank of this node that was not heard for so long does not post for the others."""
Post = Callable[[Sequence[tuple[Beat, float]], float], object]
_POSTS_A_SECOND = 6
"""What one board takes for well below a hundredth of a core (0.5 ms each); more nodes post less often."""


def post_every_s(place: Place) -> float:
    """Seconds between two posts of a node."""
    num_nodes = place.world_size / max(1, place.local_world_size)
    return max(_EVERY_S, num_nodes / _POSTS_A_SECOND)


def is_poster(local_rank: int, heard_at: Mapping[int, float], now: float) -> bool:
    """Whether this rank posts for its node: the lowest local rank that lives does."""
    return not any(other < local_rank and now - at <= _FRESH_S for other, at in heard_at.items())


class Beats:
    """A thread of the worker; it stops when the process is stopped, which is what shows a hang.

    Args:
        post: takes the beats of this node's ranks with their ages, and after how many seconds the next ones come.
        token: of this attempt; ranks with the same one hear each other.
        node_id: Ray's.
    """

    def __init__(self, post: Post, place: Place, token: str, node_id: str) -> None:
        self._post, self._place, self._node_id = post, place, node_id
        self._mail = NodeMail(f"{token}-{node_id[:16]}", place.local_rank, place.local_world_size)
        self._heard: dict[int, tuple[Beat, float]] = {}
        self._posted_at = float("-inf")
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="raydz-beats", daemon=True)
        self.step = 0

    def __enter__(self) -> Beats:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        self._stopped.set()
        self._thread.join(_EVERY_S + 1)
        self._mail.close()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY_S):
            calls, waits_for = activity()
            self.beat(Beat(self._place.rank, os.getpid(), self._node_id, self.step, calls, waits_for), time.monotonic())

    def beat(self, beat: Beat, now: float) -> None:
        """Tell the node's other ranks, hear them, and post for all of them if that is this rank's duty now."""
        local_rank = self._place.local_rank
        self._mail.send(vars(beat))
        self._heard |= {sender: (Beat(**fields), now) for sender, fields in self._mail.receive().items()}
        self._heard[local_rank] = (beat, now)
        every_s = post_every_s(self._place)
        is_due = now - self._posted_at >= every_s - _EVERY_S / 2
        if is_due and is_poster(local_rank, {sender: at for sender, (_, at) in self._heard.items()}, now):
            self._posted_at = now
            self._post([(heard, now - at) for heard, at in self._heard.values()], every_s)

"""Nodes that are told to go: how a notice reaches Ray, and how the run hears of it and leaves in time.

Neighbours: `notices.py` hears it on the node; `attempts.py` keeps a `DrainWatch` beside each group. A node that
somebody else drains (`ray drain-node`, an autoscaler, Kubernetes) is the same to the run. See README.md, "A notice".
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import ray

from raydz import log
from raydz.orchestrate.board import Standing
from raydz.orchestrate.notices import Notice

_POLL_S = 1.0
_ANSWER_S = 10.0
_UNKNOWN_LEFT_S = 120.0
_logger = log.get(__name__)


def drain_this_node(notice: Notice) -> None:
    """Nothing new is placed on this node from now on, and all who ask Ray know until when it lives.

    Raises:
        RuntimeError: Ray does not take it, or does not answer.
    """
    from ray._raylet import GcsClient  # type: ignore[attr-defined]  # as `ray drain-node` and Ray's own SIGTERM do
    from ray.core.generated import autoscaler_pb2

    context = ray.get_runtime_context()
    left_s = _UNKNOWN_LEFT_S if notice.left_s is None else notice.left_s
    reason = autoscaler_pb2.DRAIN_NODE_REASON_PREEMPTION  # type: ignore[attr-defined]
    deadline_ms = int((time.time() + left_s) * 1000)
    client = GcsClient(address=context.gcs_address)
    is_taken, refusal = client.drain_node(context.get_node_id(), reason, notice.reason, deadline_ms, timeout=_ANSWER_S)
    if not is_taken:
        raise RuntimeError(f"Ray does not drain this node: {refusal}")
    _logger.warning("this node goes (%s): it is drained, and the run saves and goes on elsewhere", notice.reason)


def draining_nodes() -> dict[str, int]:
    """Nodes that are told to go, and when, in Unix milliseconds (0: nobody said)."""
    return dict(ray._private.state.state.get_draining_nodes())


def leaving(standing: Standing, draining: Mapping[str, int]) -> list[str]:
    """Those of the nodes that have a rank of this attempt. Pure."""
    used = {beat.node_id for beat, _ in standing.beats.values()}
    return sorted(used & set(draining))


class DrainWatch:
    """A thread of the driver that asks the group to save and end once one of its nodes is drained."""

    def __init__(self, board: Any) -> None:
        self._board = board
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-drain", daemon=True)

    def __enter__(self) -> DrainWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(_POLL_S + 1)

    def _watch(self) -> None:
        while not self._over.wait(_POLL_S):
            try:
                draining = draining_nodes()
                if not draining:
                    continue
                standing, _ = ray.get(self._board.standing.remote(), timeout=_ANSWER_S)
                nodes = leaving(standing, draining)
                if nodes:
                    self._board.ask_to_stop.remote(f"node drained: {', '.join(node[:12] for node in nodes)}")
                    return
            except Exception as error:  # the head may be away for a while: the next look tells
                _logger.debug("whether nodes are drained is not known: %s", error)

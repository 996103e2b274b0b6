"""What a worker watches beside its training, for the sake of its host: the driver's answers, and notices of its end.

Neighbours: `worker.py` and `supervisor.py` train within `watching`. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from raydz.config.cluster import FailureConfig
from raydz.orchestrate.drain import drain_this_node
from raydz.orchestrate.lifeline import Lifeline
from raydz.orchestrate.notices import NoticeWatch, sources_of
from raydz.orchestrate.place import Place


@contextmanager
def watching(board: Any, place: Place, config: FailureConfig) -> Iterator[None]:
    """Every worker asks after its driver; one of each node listens for notices."""
    with ExitStack() as stack:
        stack.enter_context(Lifeline(board, config.lost_driver_s, place.world_size))
        if place.local_rank == 0:
            is_sure = config.preemption_notices != "auto"
            stack.enter_context(NoticeWatch(sources_of(config), drain_this_node, is_sure=is_sure))
        yield

"""One start of a run among others: what the failures before it decided, and who hears how far it comes.

Neighbours: `orchestrate/worker.py` makes one for each worker; `setup.py` and `loop.py` obey it and tell it. Under
torchrun, where nobody restarts a run, it is empty.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raydz import log
from raydz.checkpoint import committed_steps, set_aside, step_folder
from raydz.checkpoint.memory import MemorySnapshots
from raydz.storage import Store
from raydz.train.recovery import Interruption
from raydz.train.stopping import Asked

_logger = log.get(__name__)


def _ignore(step: int) -> None:
    """Nobody listens."""


def _unheard(step: int, metrics: Mapping[str, float]) -> None:
    """Nobody listens."""


def _never() -> str | None:
    """Nobody asks."""


@dataclass(frozen=True)
class Attempt:
    """See the module.

    Args:
        number: attempts before it.
        skips: steps whose batches are left out.
        before_step: checkpoints of this step and later are damaged and are set aside; None: none are.
        chose: is told the step of the run's newest checkpoint, 0 without one, before anything of it is read.
        began: is told the step that training goes on from.
        ended_step: is told each step that is done.
        asked_to_stop: says why this rank was asked to end the run, or None.
        measured: is told, on rank 0, the figures of each step that is done.
        interruption: what this attempt is to end; None: nothing failed.
        entered_at: Unix time at which this attempt came to this rank.
        memory: makes this rank's snapshots in memory, of which those of the attempt before are there still; None: there
            is no memory that outlives this process.
    """

    number: int = 0
    skips: frozenset[int] = frozenset()
    before_step: int | None = None
    chose: Callable[[int], None] = _ignore
    began: Callable[[int], None] = _ignore
    ended_step: Callable[[int], None] = _ignore
    asked_to_stop: Asked = _never
    measured: Callable[[int, Mapping[str, float]], None] = _unheard
    interruption: Interruption | None = None
    entered_at: float = field(default_factory=time.time)
    memory: MemorySnapshots | None = None

    def prepare(self, store: Store) -> None:
        """Make damaged checkpoints of the run invisible, and tell the step of the newest that is left. On rank 0."""
        steps = committed_steps(store)
        for step in steps:
            if self.before_step is not None and step >= self.before_step:
                _logger.warning("the checkpoint of step %d is damaged and set aside", step)
                set_aside(store, step_folder(step))
        left = [step for step in steps if self.before_step is None or step < self.before_step]
        self.chose(left[-1] if left else 0)

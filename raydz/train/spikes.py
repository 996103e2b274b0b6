"""Loss spikes: what counts as one, and what is done about it before the step is committed.

Neighbours: `loop.py` asks after a step's backward and carries the decision out; `schema.LossSpikeConfig` has the rule.
The loss of the whole step is the same number on every rank, so all decide alike. See "Loss spikes" in README.md.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal

from raydz import log
from raydz.checkpoint import open_together
from raydz.config import LossSpikeConfig
from raydz.engine import StepReport
from raydz.errors import TrainingError

if TYPE_CHECKING:
    from raydz.train.setup import Run

Action = Literal["warn", "skip", "rewind"]
_logger = log.get(__name__)


@dataclass(frozen=True)
class Spike:
    """A loss that stands out.

    Attributes:
        usual: median or mean of the window.
        score: times the median, or standard deviations above the mean.
    """

    step: int
    loss: float
    usual: float
    score: float
    action: Action

    def __str__(self) -> str:
        return f"loss {self.loss:.4f} in step {self.step} where {self.usual:.4f} is usual (score {self.score:.2f})"


class SpikeWatch:
    """Judges each step's loss by the losses before it.

    Attributes:
        count: spikes so far.
        in_row: spikes since the last step that was none.
    """

    def __init__(self, config: LossSpikeConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.window)
        self.count = 0
        self.in_row = 0

    def judge(self, step: int, loss: float) -> Spike | None:
        """Take in a step's loss. A spike that is acted on does not enter the window; a non-finite loss is none.

        Raises:
            TrainingError: `max_in_row` steps in a row were skipped or rewound: it is not a spike any more.
        """
        if not math.isfinite(loss):
            return None  # its gradient norm skips the step
        score, usual = self._score(loss)
        is_spike = score > self._config.threshold
        if not is_spike or self._config.action == "warn":
            self._losses.append(loss)
        if not is_spike:
            self.in_row = 0
            return None
        self.count += 1
        self.in_row += 1
        spike = Spike(step, loss, usual, score, self._config.action)
        if self._config.action != "warn" and self.in_row >= self._config.max_in_row:
            raise TrainingError(
                f"{self.in_row} loss spikes in a row", where=f"step {step}", got=f"loss {loss:.4f}",
                wanted=f"about {usual:.4f}, as in the {len(self._losses)} steps before",
                remedy="look at the data of these steps, lower the learning rate, or raise train.loss_spike.threshold",
            )  # fmt: skip
        return spike

    def _score(self, loss: float) -> tuple[float, float]:
        """Score and what is usual; no score before the window is full."""
        if len(self._losses) < self._config.window:
            return -math.inf, math.nan
        if self._config.rule == "median":
            median = statistics.median(self._losses)
            return (loss / median if median > 0 else -math.inf), median
        mean = statistics.fmean(self._losses)
        deviation = statistics.pstdev(self._losses, mean)
        return ((loss - mean) / deviation if deviation > 0 else -math.inf), mean

    def state(self) -> dict[str, Any]:
        """JSON for a checkpoint: a resumed run judges as an uninterrupted one."""
        return {"losses": list(self._losses), "count": self.count, "in_row": self.in_row}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`, with as many of its losses as the window takes."""
        self._losses = deque(state["losses"], maxlen=self._config.window)
        self.count, self.in_row = int(state["count"]), int(state["in_row"])


def commit_or_answer(run: Run, step: int, loss: float) -> StepReport:
    """End a step whose backward is done: commit it, or do what the rule says about a spike.

    Rewinding loads the run's newest checkpoint into the engine, before which the step is dropped; the data goes on with
    the next step's batch, so what lies between is not trained on again. Without a checkpoint the step is only dropped.

    Collective: every rank, with the same `loss`.

    Raises:
        TrainingError: too many in a row. CheckpointError: the checkpoint cannot be read.
    """
    spike = run.spikes.judge(step, loss) if run.spikes else None
    if spike is None or spike.action == "warn":
        report = run.engine.step()
        assert report is not None, "the last micro-batch of a step updates"
    else:
        report = run.engine.discard_step()
    if spike is not None:
        if spike.action == "rewind" and run.saves is not None:
            run.saves.poll(wait=True)  # which checkpoint is the newest must not depend on the disk
        folder = run.newest_folder if spike.action == "rewind" else None
        if folder is not None:
            _rewind(run, folder)
        _tell(run, spike, folder)
    return report


def _rewind(run: Run, folder: str) -> None:
    comm = run.engine.comms.world
    _, manifest = open_together(comm, run.store, folder)
    run.engine.load_from(run.store, folder, manifest)


def _tell(run: Run, spike: Spike, folder: str | None) -> None:
    done = {"warn": "trained on", "skip": "skipped", "rewind": f"rewound to {folder}"}[spike.action]
    if spike.action == "rewind" and folder is None:
        done = "skipped: there is no checkpoint to rewind to yet"
    _logger.warning("%s: %s", spike, done)
    if run.tracker:
        run.tracker.log_event("loss_spike", {**asdict(spike), "done": done})

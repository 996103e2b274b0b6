"""The fixed names of what is measured, and how each is reduced over ranks to one number.

Layer 3. `train/loop.py` fills a dict with these names, `reduce_over_ranks` makes one of all ranks' dicts, and rank 0
hands it to `tracking.tracker.Tracker`. A new figure is one new row of `METRICS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Literal

from raydz.errors import ConfigError

Reduction = Literal["mean", "max", "sum", "rank0"]


@dataclass(frozen=True)
class Metric:
    """One row of the table.

    Args:
        reduce: over the ranks that report it. `rank0`: not sent anywhere, because it is the same on every rank already.
    """

    name: str
    unit: str
    reduce: Reduction
    meaning: str


_ROWS = (
    Metric("loss", "nats/token", "mean", "training loss of the step"),
    Metric("lr", "1", "rank0", "learning rate of the first parameter group, as used in the step"),
    Metric("grad_norm", "1", "rank0", "global norm of the gradient before clipping"),
    Metric("step_time_s", "s", "mean", "wall time of a step, evaluation and checkpoints left out"),
    Metric("step_time_max_s", "s", "max", "the slowest rank's step_time_s; made by reduce_over_ranks"),
    Metric("tokens_per_s", "tokens/s", "sum", "trained tokens a second; each rank reports its own"),
    Metric("tokens_seen", "tokens", "rank0", "trained tokens since step 0, all ranks, over all attempts"),
    Metric("mfu", "1", "mean", "model FLOPs done over the device's peak FLOPs"),
    Metric("memory_peak_bytes", "bytes", "max", "peak of device memory since the last reset; host memory on a CPU"),
    Metric("host_memory_peak_bytes", "bytes", "max", "peak resident memory of the process since the last reset"),
    Metric("comm_share", "1", "mean", "time the compute stream waited for communication over step time"),
    Metric("comm_time_share", "1", "mean", "all communication, hidden or not, over step time"),
    Metric("data_wait_share", "1", "mean", "time waited for the next batch over step time"),
    Metric("offload_wait_share", "1", "mean", "time waited for a host or NVMe tier over step time"),
    Metric("offload_rollback_rate", "1", "rank0", "how often the norm undid updates that had begun before it"),
    Metric("skipped_steps", "steps", "max", "steps skipped so far because of non-finite gradients"),
    Metric("loss_scale", "1", "rank0", "factor of the step's losses under fp16"),
    Metric("loss_spikes", "steps", "rank0", "steps so far whose loss stood out, by train.loss_spike"),
    Metric("checkpoint_blocking_s", "s", "max", "time that training stood still for a checkpoint"),
    Metric("checkpoint_failures", "saves", "rank0", "checkpoints of this attempt that could not be saved"),
    Metric("eval_loss", "nats/token", "rank0", "loss on an evaluation set; eval_loss/<set> if it has a name"),
    Metric("restarts", "1", "rank0", "failed attempts of the run so far, with each step after one"),
    Metric("lost_steps", "steps", "rank0", "steps so far that were done, and lost with a failure"),
    Metric("recovery_s", "s", "rank0", "last step before a failure or resize to the first one after; also by phase"),
    Metric("world_size", "ranks", "rank0", "ranks that trained the step"),
    Metric("attempt", "1", "rank0", "how often the run has been restarted; written with every step"),
)
METRICS: dict[str, Metric] = {row.name: row for row in _ROWS}
"""The table, by name, in the order of the documentation."""

_FAMILIES = ("eval_loss", "recovery_s")
_SENT = tuple(row for row in _ROWS if row.reduce != "rank0")


def find(name: str) -> Metric:
    """The row for a name; `eval_loss/<set>` has the row of `eval_loss`, `recovery_s/<phase>` that of `recovery_s`.

    Raises:
        ConfigError: no such name (names the closest).
    """
    family, slash, member = name.partition("/")
    if slash and member and family in _FAMILIES:
        name = family
    if name not in METRICS:
        close = difflib.get_close_matches(name, METRICS, n=1)
        raise ConfigError(
            "unknown metric",
            got=name,
            wanted=f"{close[0]}?" if close else ", ".join(METRICS),
            remedy="use a name of raydz.tracking.METRICS, or add a row there",
        )
    return METRICS[name]


def check_names(names: Iterable[str]) -> None:
    """Refuse names that are not in the table.

    Raises:
        ConfigError: see `find`.
    """
    for name in names:
        find(name)


def reduce_over_ranks(local: dict[str, float], gather: Callable[[list[float]], list[list[float]]]) -> dict[str, float]:
    """One dict for all ranks; `step_time_s` becomes mean and max (`step_time_max_s`).

    Ranks may report different names. The vector that travels has one fixed layout, so they cannot get out of step.
    A NaN on one rank stays a NaN in the result.

    Args:
        local: this rank's figures.
        gather: an all-gather of a list of floats, one list a rank in the order of ranks.

    Collective: calls `gather` once, on every rank together, with the same length.

    Raises:
        ConfigError: a name that is not in the table.
    """
    check_names(local)
    figures = dict(local)
    if "step_time_s" in figures:
        figures["step_time_max_s"] = figures["step_time_s"]
    present = [float(row.name in figures) for row in _SENT]
    values = [float(figures.get(row.name, 0.0)) for row in _SENT]
    columns = list(zip(*gather(present + values), strict=True))
    reduced = {name: value for name, value in local.items() if find(name).reduce == "rank0"}
    for row, has, everyone in zip(_SENT, columns[: len(_SENT)], columns[len(_SENT) :], strict=True):
        reported = everyone if all(has) else tuple(compress(everyone, has))
        if reported:
            reduced[row.name] = _combine(row.reduce, reported)
    return reduced


def _combine(how: Reduction, values: Sequence[float]) -> float:
    total = sum(values)
    if how == "max":  # max() would keep or lose a NaN by position; the sum shows at once whether there may be one
        return math.nan if math.isnan(total) and any(map(math.isnan, values)) else max(values)
    return total / len(values) if how == "mean" else total

"""Which checkpoints of a run to keep: a pure function of what is there.

Neighbours: `sweep.py` takes stock, asks here, and deletes. See the note "Retention" in README.md.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from raydz.config import CheckpointConfig
from raydz.errors import ConfigError


@dataclass(frozen=True)
class Best:
    """Keep `count` checkpoints for a metric that they were saved with."""

    metric: str
    mode: Literal["min", "max"] = "min"
    count: int = 1


@dataclass(frozen=True)
class Rules:
    """What to keep.

    Args:
        last: so many of the newest; None keeps all.
        every: those whose step is a multiple of it; 0 none.
    """

    last: int | None = None
    every: int = 0
    best: Best | None = None

    def __post_init__(self) -> None:
        """Refuse rules that could empty a run.

        Raises:
            ConfigError: names the rule.
        """
        numbers = {"last": self.last, "best.count": None if self.best is None else self.best.count}
        for name, value in numbers.items():
            if value is not None and value < 1:
                raise ConfigError("a rule that keeps nothing", where=f"keep_{name}", got=value, wanted="1 or more")
        if self.every < 0:
            raise ConfigError("not a number of steps", where="keep_every", got=self.every, wanted="0 or more")
        if self.best and self.best.mode not in ("min", "max"):
            raise ConfigError("unknown mode", where="keep_best.mode", got=self.best.mode, wanted="min or max")

    @classmethod
    def of(cls, config: CheckpointConfig) -> Rules:
        """The rules of a run."""
        best = config.keep_best
        return cls(
            config.keep_last, config.keep_every, None if best is None else Best(best.metric, best.mode, best.count)
        )


@dataclass(frozen=True)
class Whole:
    """A committed checkpoint whose data files are all there, and the metrics it was saved with."""

    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)


def surplus(found: Sequence[Whole], rules: Rules, in_use: Collection[int] = ()) -> list[int]:
    """Steps of checkpoints that no rule keeps, oldest first.

    The newest whole one is kept by every rule. A metric that is missing or not a number never makes a checkpoint the
    best; of equal values the oldest counts, which is the one that was evaluated when the metric was taken.

    Args:
        in_use: steps that something loads from or saves to.
    """
    steps = sorted(whole.step for whole in found)
    if rules.last is None or not steps:
        return []
    kept = {*steps[-rules.last :], steps[-1], *in_use, *best_steps(found, rules.best)}
    return [step for step in steps if step not in kept and not (rules.every and step % rules.every == 0)]


def best_steps(found: Sequence[Whole], best: Best | None) -> list[int]:
    """Steps of the best checkpoints, the best first."""
    if best is None:
        return []
    sign = 1 if best.mode == "min" else -1
    values = {whole.step: whole.metrics.get(best.metric, math.nan) for whole in found}
    known = [(sign * value, step) for step, value in values.items() if not math.isnan(value)]
    return [step for _, step in sorted(known)[: best.count]]

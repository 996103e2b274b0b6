"""The figures of each step as Ray metrics, for Prometheus and the dashboard of `cluster/grafana/`.

Neighbours: `worker.py` makes one on rank 0 and hands it to the loop, which calls it with figures that are reduced over
ranks already; the node's metrics agent exports them. See README.md, "Dashboards".
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ray.util.metrics import Gauge

from raydz.tracking import METRICS

_TAGS = ("run", "rank", "part")
_STEP = "step"
NAMES = {name: f"raydz_{name}" for name in (_STEP, *METRICS)}
"""Ray metric of each row of `METRICS` and of the step; Prometheus has them as `ray_raydz_…`."""


class Gauges:
    """One gauge a metric, with the tags `run`, `rank` ("0": figures are of all ranks) and `part`.

    `part` is the name behind the slash in `eval_loss/<set>` and `recovery_s/<phase>`, else empty.
    """

    def __init__(self, run: str) -> None:
        self._tags = {"run": run, "rank": "0", "part": ""}
        self._gauges: dict[str, Gauge] = {}
        self._set("restarts", "", 0.0)
        self._set("lost_steps", "", 0.0)

    def __call__(self, step: int, metrics: Mapping[str, float]) -> None:
        """Export a step's figures; returns at once. What is not finite keeps its last value: Ray drops it."""
        self._set(_STEP, "", step)
        for name, value in metrics.items():
            family, _, part = name.partition("/")
            self._set(family, part, value)

    def _set(self, name: str, part: str, value: float) -> None:
        if not math.isfinite(value):
            return
        gauge = self._gauges.get(name)
        if gauge is None:
            meaning = "last step that ended" if name == _STEP else METRICS[name].meaning
            gauge = self._gauges[name] = Gauge(NAMES[name], description=meaning, tag_keys=_TAGS)
        gauge.set(float(value), tags={**self._tags, "part": part})

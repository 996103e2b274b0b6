"""A slow step explains itself: from what was waited for to one line that says what limits and which key to change.

Layer 3. `train/figures.py` hands in a step's waits; `pipeline.py`, `nvme.py` and `parameters.py` count them. Pure: no
clock, no log of its own. README.md, "A slow step explains itself", has the causes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from raydz.offload.speculation import OffloadStep


@dataclass(frozen=True)
class Cause:
    """One thing that a step can wait for.

    Args:
        what: what was waited for, as the line says it.
        limit: what limits then.
        remedy: the keys to change.
    """

    what: str
    limit: str
    remedy: str


_LESS_CPU_WORK = (
    "offload_optimizer.ratio below 1 keeps a part of the states on the device, bf16.bf16_optimizer_states moves 18 "
    "bytes an element instead of 26, more rows in train_micro_batch_size_per_gpu or more accumulation give it more time"
)
CAUSES: dict[str, Cause] = {
    "gradient": Cause(
        "a gradient bucket whose unit is still being updated",
        "the updates on the CPU do not keep up with backward",
        f"raise parallel.offload_threads, or give this job more CPUs; {_LESS_CPU_WORK}",
    ),
    "update": Cause(
        "updates on the CPU",
        "the CPU's memory bandwidth or its threads",
        f"raise parallel.offload_threads (the node's CPUs shared by its ranks), set parallel.offload_affinity to one "
        f"socket's CPUs; {_LESS_CPU_WORK}",
    ),
    "return": Cause(
        "weights on their way to the device",
        "the link between host and device (PCIe)",
        "set offload_optimizer.pin_memory to true; offload_optimizer.ratio below 1 sends less",
    ),
    "parameters": Cause(
        "offloaded parameters",
        "the link between host and device, or that too little is fetched ahead",
        "raise zero_optimization.stage3_prefetch_bucket_size, offload_param.buffer_count or "
        "stage3_param_persistence_threshold, set offload_param.pin_memory to true, or put more rows into "
        "train_micro_batch_size_per_gpu",
    ),
    "activations": Cause(
        "offloaded activations",
        "the link between host and device",
        "recompute them from fewer block inputs, or set activation_checkpointing.cpu_checkpointing to false",
    ),
    "disk_read": Cause(
        "reads of the disk",
        "the disk's read bandwidth",
        "set offload_optimizer.pipeline_read to true, raise offload_optimizer.buffer_count, aio.queue_depth and "
        "aio.block_size; a larger parallel.host_memory_budget keeps more of the states in host memory",
    ),
    "disk_write": Cause(
        "writes to the disk",
        "the disk's write bandwidth",
        "set offload_optimizer.pipeline_write to true, raise offload_optimizer.buffer_count; a larger "
        "parallel.host_memory_budget keeps more of the states in host memory; use a faster disk",
    ),
    "rollback": Cause(
        "updates made again because the norm changed their factor",
        "clipping that fires after an update was tried",
        'set parallel.offload_update to "waiting", or raise gradient_clipping',
    ),
}
"""By the name under which it is counted."""


@dataclass(frozen=True)
class SlowSteps:
    """When to explain, and when not to again.

    Args:
        above: share of a step that has to be waited for.
        every: steps between two lines.
        last: the step of the last line.
    """

    above: float = 0.1
    every: int = 100
    last: int | None = None

    def judge(
        self, step: int, step_s: float, waits_s: Mapping[str, float], figures: Mapping[str, str] | None = None
    ) -> Verdict:
        """What to say of a step, and what to judge the next one with.

        Args:
            step: its number; numbers that begin anew, as after a resume, end the silence.
            waits_s: seconds that training waited, by the names of `CAUSES`.
            figures: measured bandwidths and sizes by cause, each as words for the line.
        """
        waited_s = sum(waits_s.values())
        is_silent = self.last is not None and 0 <= step - self.last < self.every
        if step_s <= 0 or waited_s <= self.above * step_s or is_silent:
            return Verdict(None, self)
        line = explanation(step, step_s, waits_s, figures or {})
        return Verdict(line, SlowSteps(self.above, self.every, step))


@dataclass(frozen=True)
class Verdict:
    """Args: line: of the log, or None. then: what judges the next step."""

    line: str | None
    then: SlowSteps = field(default_factory=SlowSteps)


def waits_of(step: OffloadStep) -> dict[str, float]:
    """What training waited for by the names of `CAUSES`: updates that the norm had made again count as `rollback`."""
    waits = dict(step.waits_s)
    if step.mode == "speculative" and step.rolled_back and "update" in waits:
        waits["rollback"] = waits.pop("update")
    return waits


def figures_of(step: OffloadStep) -> dict[str, str]:
    """What was measured beside the waits, by cause."""
    updates = f"their threads worked {step.updating_s:.3f} s"
    rollbacks = f"{step.rollback_rate:.0%} of recent steps"
    return {"update": updates, "gradient": updates, "rollback": rollbacks}


def offload_wait_share(step_s: float, waits_s: Mapping[str, float]) -> float:
    """Of a step, what was waited for offload: the metric of that name."""
    return sum(waits_s.values()) / step_s if step_s > 0 else 0.0


def explanation(step: int, step_s: float, waits_s: Mapping[str, float], figures: Mapping[str, str]) -> str:
    """The line: how much was waited, for what above all, what that means and what to change."""
    worst, worst_s = max(waits_s.items(), key=lambda item: item[1])
    cause = CAUSES[worst]
    parts = ", ".join(
        f"{name} {seconds:.3f} s" for name, seconds in sorted(waits_s.items(), key=lambda item: -item[1]) if seconds > 0
    )
    measured = f" ({figures[worst]})" if worst in figures else ""
    return (
        f"step {step} took {step_s:.3f} s and waited {sum(waits_s.values()):.3f} s of it for offload [{parts}]: "
        f"{worst_s / step_s:.0%} for {cause.what}{measured}. What limits: {cause.limit}. To change: {cause.remedy}"
    )

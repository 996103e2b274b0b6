"""A plan against what is free: the refusal before anything is allocated, and the words of an out-of-memory later.

Neighbours: `train/memory.py` measures what is free and calls these; `estimate.py` makes the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

from raydz.errors import ConfigError, TrainingError
from raydz.plan.estimate import Plan
from raydz.units import format_bytes

_WORTH_IT = 0.05
"""Of the total: changing a smaller part helps nobody."""

_ESTIMATES = ("activations", "logits")


def describe_parts(parts: Mapping[str, int]) -> str:
    """`weights 1.0 GiB, moments 0.5 GiB`, the largest first."""
    largest_first = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(value)}" for name, value in largest_first if value) or "nothing"


def key_to_change(plan: Plan, *, certain: bool = False) -> str:
    """The setting that shrinks the largest part that can still shrink; with `certain` estimates are left out."""
    memory = plan.memory
    parts = {name: value for name, value in memory.parts().items() if not certain or name not in _ESTIMATES}
    for name, value in sorted(parts.items(), key=lambda part: -part[1]):
        remedy = _remedy(name, plan) if value >= _WORTH_IT * sum(parts.values()) else None
        if remedy:
            return remedy
    return f"more ranks than {plan.ranks}, or a smaller model: {format_bytes(memory.model_states)} are its states"


def _remedy(part: str, plan: Plan) -> str | None:
    stage, shared = plan.stage, plan.ranks > 1
    if part in ("masters", "moments", "sums") and stage == 0 and shared:
        return "zero_optimization.stage 1 or more: it shares masters and optimizer states over ranks"
    if part == "gradients" and stage < 2 and shared:
        return "zero_optimization.stage 2 or more: it shares gradients over ranks"
    if part == "weights" and stage < 3 and shared:
        return "zero_optimization.stage 3: it shares weights over ranks"
    if part == "weights" and stage == 3 and 2 * plan.persistent_bytes > plan.memory.weights and shared:
        kept = format_bytes(plan.persistent_bytes)
        return f"a smaller zero_optimization.stage3_param_persistence_threshold: {kept} stay gathered"
    if part == "gathered":
        return "a smaller zero_optimization.stage3_prefetch_bucket_size, or smaller parallel.units"
    if part == "buckets" and shared:
        return "a smaller zero_optimization.reduce_bucket_size"
    if part in ("activations", "logits"):
        return _smaller_micro_batch(part, plan)
    return None


def _smaller_micro_batch(part: str, plan: Plan) -> str | None:
    if part == "activations" and plan.recomputes == "none":
        return "model.activation_checkpointing true (about 30% more computation)"
    if plan.batch.micro_batch > 1:
        return f"train_micro_batch_size_per_gpu less than {plan.batch.micro_batch}, with more accumulation"
    return "a smaller data.sequence_length"


def check_fits(plan: Plan, free_bytes: int, place: str) -> None:
    """Refuse a plan whose certain parts (without activations and logits, which are estimates) exceed what is free.

    Args:
        place: what was measured, for the message.

    Raises:
        ConfigError: names the bytes by part and the key to change.
    """
    if plan.memory.certain <= free_bytes:
        return
    raise ConfigError(
        f"stage {plan.stage} on {plan.ranks} ranks does not fit; nothing was allocated",
        where=place,
        got=f"a need of {format_bytes(plan.memory.total)} a rank: {describe_parts(plan.memory.parts())}",
        wanted=f"at most {format_bytes(free_bytes)}, which are free",
        remedy=key_to_change(plan, certain=True),
    )


def out_of_memory(plan: Plan, measured: Mapping[str, int], when: str, detail: str) -> TrainingError:
    """The error for an allocation that failed in spite of the plan."""
    return TrainingError(
        f"out of memory {when}",
        where=detail,
        got=f"measured {describe_parts(measured)}",
        wanted=f"planned {format_bytes(plan.memory.total)} a rank: {describe_parts(plan.memory.parts())}",
        remedy=key_to_change(plan),
    )

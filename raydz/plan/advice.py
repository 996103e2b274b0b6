"""A recommendation in words, in the order that saves the most grief: first right, then a larger batch, then bigger.

Neighbours: `estimate.Planner` answers its questions; `cli/plan.py` prints the lines.
"""

from __future__ import annotations

from dataclasses import replace

from raydz.config.engine import EngineSections
from raydz.plan.estimate import Plan, Planner
from raydz.units import format_bytes

USABLE = 0.9
"""Of a device's memory: the rest is for kernels, the allocator's gaps and what nobody plans."""

_GIB = 1 << 30
_DEVICES = (16, 24, 40, 48, 80, 96, 141, 192)
_MOST_RANKS = 1 << 14
_MOST_ROWS = 1 << 10


def advise(planner: Planner, ranks: int, memory_bytes: int | None) -> list[str]:
    """Lines to follow one after the other.

    Args:
        memory_bytes: of a rank's device; None gives the size of device that each stage would need.
    """
    lines, planner = _offload(planner, ranks), _without_offload(planner)
    if memory_bytes is None:
        return [*lines, *_needs(planner, ranks)]
    return [*lines, *_order(planner, ranks, memory_bytes)]


def _without_offload(planner: Planner) -> Planner:
    """First right, then offloaded: what follows is about the device alone."""
    zero = planner.config.zero_optimization.model_copy(update={"offload_optimizer": None, "offload_param": None})
    return replace(planner, config=planner.config.model_copy(update={"zero_optimization": zero}))


def _offload(planner: Planner, ranks: int) -> list[str]:
    """What is not on the device, and where it is."""
    if not offload_asked(planner.config):
        return []
    away = planner.at(ranks).offloaded
    parts = [f"{format_bytes(away.host)} in host memory"] if away.host else []
    parts += [f"{format_bytes(away.disk)} on a disk"] if away.disk else []
    line = "offload keeps " + " and ".join(parts or ["nothing"]) + " a rank"
    if away.second and planner.config.parallel.offload_update != "waiting":
        line += (
            f"; {format_bytes(away.second)} of host memory more lets updates begin before the gradient norm is known"
        )
    return [line]


def offload_asked(config: EngineSections) -> dict[str, str]:
    """Offload keys that ask for something, and for what."""
    zero = config.zero_optimization
    sections = {"offload_optimizer": zero.offload_optimizer, "offload_param": zero.offload_param}
    return {
        f"zero_optimization.{name}": section.device
        for name, section in sections.items()
        if section is not None and section.device != "none"
    }


def _needs(planner: Planner, ranks: int) -> list[str]:
    first, third = planner.at(ranks, stage=2, micro_batch=1), planner.at(ranks, stage=3, micro_batch=1)
    sent = _ratio(planner.at(ranks, stage=3), planner.at(ranks, stage=2))
    return [
        f"first right: stage 2 without offload, one row a micro-batch, needs {_need(first)} a rank",
        f"only if that is too much: stage 3 needs {_need(third)}, and sends {sent} as much a step",
        "with --memory 80GiB this says which stage, micro-batch and number of ranks fit",
    ]


def _need(plan: Plan) -> str:
    fits = [size for size in _DEVICES if plan.memory.total <= USABLE * size * _GIB]
    device = f"a device of {fits[0]} GiB" if fits else "more than any device has"
    return f"{format_bytes(plan.memory.total)} ({device})"


def _ratio(plan: Plan, other: Plan) -> str:
    return f"{plan.traffic.total / other.traffic.total:.2g} times" if other.traffic.total else "nothing, as before,"


def _order(planner: Planner, ranks: int, memory_bytes: int) -> list[str]:
    usable = int(USABLE * memory_bytes)
    asked = planner.at(ranks)

    def fits(plan: Plan) -> bool:
        return plan.memory.total <= usable

    for stage in (2, 3) if ranks > 1 else (asked.stage,):
        plain = planner.at(ranks, stage=stage, micro_batch=1)
        if fits(plain):
            return _found(planner, plain, asked, usable, "")
        spare = planner.at(ranks, stage=stage, micro_batch=1, recomputes="full")
        if planner.work is not None and plain.recomputes == "none" and fits(spare):
            return _found(planner, spare, asked, usable, "model.activation_checkpointing true")
    return [_beyond(planner, ranks, usable)]


def _found(planner: Planner, plan: Plan, asked: Plan, usable: int, besides: str) -> list[str]:
    """What to start with, how far the batch can grow, and what else the file asks for."""
    two = planner.at(plan.ranks, stage=2, micro_batch=1, recomputes=plan.recomputes)
    reason = (
        {
            2: "the least communication among the stages that share gradients",
            3: f"stage 2 needs {format_bytes(two.memory.total)}, which is too much",
        }.get(plan.stage, "on one rank nothing is shared")
        if plan.ranks > 1
        else "on one rank nothing is shared"
    )
    extra = f" and {besides} (about 30% more computation)" if besides else ""
    lines = [
        f"first right: stage {plan.stage}{extra}, no offload, one row a micro-batch: "
        f"{format_bytes(plan.memory.total)} of {format_bytes(usable)} usable; {reason}"
    ]
    rows = _largest_micro_batch(planner, plan, usable)
    if planner.work is None:
        lines.append("then a larger micro-batch while you watch memory_peak_bytes: the model's activations are unknown")
    elif rows > 1:
        lines.append(f"then a larger batch: up to train_micro_batch_size_per_gpu {rows} fits")
    if planner.work is not None and asked.batch.micro_batch > rows:
        lines.append(_too_many_rows(planner, plan, asked, usable))
    if asked.stage > plan.stage:
        lines.append(
            f"stage {asked.stage}, as configured, is not needed: it sends {format_bytes(asked.traffic.total)} a step "
            f"and stage {plan.stage} {format_bytes(planner.at(plan.ranks, stage=plan.stage).traffic.total)}; "
            "take it for larger micro-batches, measured one change at a time"
        )
    elif asked.stage < plan.stage and asked.memory.total > usable:
        lines.append(f"stage {asked.stage}, as configured, needs {format_bytes(asked.memory.total)}: it does not fit")
    return lines


def _too_many_rows(planner: Planner, plan: Plan, asked: Plan, usable: int) -> str:
    """What to do about a configured micro-batch that is more than fits."""
    rows = asked.batch.micro_batch
    said = f"{rows} rows a micro-batch, as configured, need more than that"
    spare = planner.at(plan.ranks, stage=plan.stage, micro_batch=rows, recomputes="full")
    if plan.recomputes != "full" and spare.memory.total <= usable:
        need = format_bytes(spare.memory.total)
        return f"{said}; with model.activation_checkpointing true (about 30% more computation) {need}"
    return f"{said}: keep train_batch_size and let gradient_accumulation_steps rise"


def _largest_micro_batch(planner: Planner, plan: Plan, usable: int) -> int:
    """The largest power of two that fits, and that the batch can be cut into."""
    rows, limit = 1, min(_MOST_ROWS, max(1, planner.at(plan.ranks).batch.global_batch // plan.ranks))
    while 2 * rows <= limit:
        larger = planner.at(plan.ranks, stage=plan.stage, micro_batch=2 * rows, recomputes=plan.recomputes)
        if larger.memory.total > usable:
            break
        rows *= 2
    return rows


def _beyond(planner: Planner, ranks: int, usable: int) -> str:
    """Nothing fits on so few ranks: how many would do."""
    recomputes = "full" if planner.work is not None else None
    least = planner.at(ranks, stage=3, micro_batch=1, recomputes=recomputes)  # type: ignore[arg-type]
    said = f"not on {ranks} ranks: stage 3 needs {format_bytes(least.memory.total)} of {format_bytes(usable)} usable"
    more = ranks * 2
    while more <= _MOST_RANKS:
        plan = planner.at(more, stage=3, micro_batch=1, recomputes=recomputes)  # type: ignore[arg-type]
        if plan.memory.total <= usable:
            besides = ", activation checkpointing" if recomputes else ""
            return f"{said}; {more} ranks do: stage 3{besides}, {format_bytes(plan.memory.total)} a rank"
        more *= 2
    return f"{said}, and no number of ranks helps: what one unit and one row need is too much; smaller parallel.units"

"""The plan of a run against this machine: before the engine is built, and in the words of an out-of-memory later.

Neighbours: `setup.py` checks and records, `loop.py` wraps the steps; `raydz.plan` counts and refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from raydz import log
from raydz.config import Config
from raydz.dist import World
from raydz.engine import Engine
from raydz.models import Decoder
from raydz.optim import build_optimizer
from raydz.plan import (
    ParameterShape,
    Plan,
    Planner,
    UnitShape,
    check_fits,
    decoder_sizes,
    describe_parts,
    out_of_memory,
    workload,
)
from raydz.tracking import read_peaks
from raydz.tracking.memory import memory_bytes
from raydz.units import format_bytes
from raydz.zero import ParameterSpec, find_units
from raydz.zero.precision import PrecisionPlan
from raydz.zero.settings import plan_settings

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_CPU_REFUSAL = "DefaultCPUAllocator"  # torch raises a plain RuntimeError where the host refuses memory
_logger = log.get(__name__)


@dataclass(frozen=True)
class MemoryCheck:
    """A run's plan, and what was free when it was made."""

    plan: Plan
    free_bytes: int | None
    place: str

    def as_text(self) -> str:
        """A line a part, for people."""
        plan, memory = self.plan, self.plan.memory
        free = "unknown" if self.free_bytes is None else format_bytes(self.free_bytes)
        lines = [f"stage {plan.stage} on {plan.ranks} ranks, bytes a rank; free: {free} ({self.place})"]
        lines += [f"{name:<12} {format_bytes(value):>11}" for name, value in memory.parts().items()]
        lines += [f"{'states':<12} {format_bytes(memory.model_states):>11}", f"{'total':<12} {_figure(memory.total)}"]
        lines.append(f"{'snapshot':<12} {_figure(plan.snapshot_bytes)}  of host memory, for saves behind training")
        lines.append(f"{'sent a step':<12} {_figure(plan.traffic.total)}")
        return "\n".join([*lines, "activations and logits are estimates; 0 where the model is not raydz's", ""])

    def as_event(self) -> dict:
        """Plain values, for the run's events."""
        return {**self.plan.as_json(), "free_bytes": self.free_bytes}


def _figure(value: int) -> str:
    return f"{format_bytes(value):>11}"


def check_memory(config: Config, module: nn.Module, world: World, vocab_size: int) -> MemoryCheck:
    """Plan this rank's memory and compare it with what is free; nothing is allocated.

    Raises:
        ConfigError: it cannot fit; names the bytes by part and the key to change.
    """
    planner = run_planner(config, module, world, vocab_size)
    plan = planner.at(world.world_size)
    free, place = free_bytes(world)
    if free is None:
        _logger.warning("what is free cannot be told on this system, so the plan was not compared with it")
    else:
        check_fits(plan, free, place)
        if plan.memory.total > free:
            _logger.warning(
                "with activations and logits, which are estimates, stage %d needs %s and %s are free (%s): %s",
                plan.stage, format_bytes(plan.memory.total), format_bytes(free), place,
                describe_parts(plan.memory.parts()),
            )  # fmt: skip
        if config.scaling.is_elastic:
            _warn_of_fewest(planner.at(config.scaling.min_workers), free, place)
    _warn_of_snapshot(plan, world)
    return MemoryCheck(plan, free, place)


def _warn_of_fewest(plan: Plan, free: int, place: str) -> None:
    """Each of fewer workers has more of the state; one that then does not fit would be the end of the run."""
    if plan.memory.certain > free:
        _logger.warning(
            "with the fewest workers of scaling.num_workers, %d, a rank takes %s and %s are free (%s): "
            "the run cannot shrink so far; raise the minimum",
            plan.ranks, format_bytes(plan.memory.certain), format_bytes(free), place,
        )  # fmt: skip


def _warn_of_snapshot(plan: Plan, world: World) -> None:
    """Saves in the background copy this rank's states to host memory, which on a CPU is where they are already."""
    snapshot = plan.snapshot_bytes
    try:
        free = memory_bytes()[1] // world.local_world_size
    except OSError:
        return
    if snapshot and snapshot + (plan.memory.total if world.device.type == "cpu" else 0) > free:
        _logger.warning(
            "a save in the background may not find the %s of host memory that its snapshot takes: %s are free "
            "for this rank; checkpoint.async_save: false needs none", format_bytes(snapshot), format_bytes(free),
        )  # fmt: skip


def run_planner(config: Config, module: nn.Module, world: World, vocab_size: int) -> Planner:
    """The planner of a built model, whoever's it is; only that of raydz's decoder knows activations."""
    engine = config.engine()
    precision = PrecisionPlan.of(module, _DTYPES[engine.compute_dtype], engine.parallel.fp32_modules or ())
    optimizer = build_optimizer(engine.optimizer.type, **engine.optimizer.params.model_dump())
    settings = plan_settings(module, optimizer)

    def shape_of(spec: ParameterSpec) -> ParameterShape:
        return ParameterShape(
            spec.name, tuple(spec.parameter.shape), tuple(spec.aliases), spec.parameter.requires_grad,
            precision.dtype_of(spec).itemsize, settings[spec.name].is_matrix,
        )  # fmt: skip

    units = [
        UnitShape(unit.name, tuple(shape_of(spec) for spec in unit.parameters), unit.is_lookup)
        for unit in find_units(module, engine.parallel.units)
    ]
    device = world.device.type
    is_ours = isinstance(module, Decoder)
    work = workload(config, decoder_sizes(config, vocab_size), device) if is_ours else None
    return Planner(
        engine, units, work, device, keeps_average=config.train.ema_decay is not None,
        saves_behind=config.checkpoint.saves_behind,
    )  # fmt: skip


def free_bytes(world: World) -> tuple[int | None, str]:
    """What this rank may take, and where: of its GPU, or its part of the host; None where nobody says."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[0], str(world.device)
    place = f"host memory over {world.local_world_size} local ranks"
    try:
        return memory_bytes()[1] // world.local_world_size, place
    except OSError:
        return None, place


@contextmanager
def naming_out_of_memory(check: MemoryCheck, engine: Engine | None, when: str) -> Iterator[None]:
    """Raise an out-of-memory within the block as a TrainingError: bytes by part, planned and measured, and the key.

    Args:
        engine: whose tensors are measured; None while it is being built.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        is_named = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not is_named and _CPU_REFUSAL not in str(error):
            raise
        measured = {} if engine is None else measured_bytes(engine)
        measured["peak of the process"] = int(read_peaks()["memory_peak_bytes"])
        detail = (str(error) or type(error).__name__).splitlines()[0]
        raise out_of_memory(check.plan, measured, when, detail) from error


def measured_bytes(engine: Engine) -> dict[str, int]:
    """Bytes of the engine's tensors on the device that exist now under the plan's names, each storage once."""
    seen: set[int] = set()

    def size(tensors: Sequence[Tensor | None]) -> int:
        total = 0
        for tensor in tensors:
            storage = None if tensor is None else tensor.untyped_storage()
            if storage is not None and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    groups, gradients = engine.sharded.groups, engine.sharded.gradients
    here = [group for group in groups if group.source is None]  # of the others, masters and states are offloaded
    found = {"weights": size([g.weights.compute for g in here] + [g.full for g in groups if g.keeps_parameters])}
    seconds = [g.gathering.second for g in groups if g.gathering is not None]
    found["weights"] += size([second.values for second in seconds if second is not None])
    found["gathered"] = size([group.full for group in groups])
    found["masters"] = size([t for group in here for t in (group.weights.low, group.weights.separate)])
    averages = engine.average.values if engine.average else []
    found["moments"] = size([*engine.optimizer.device_states(), *averages])
    found["gradients"] = size([grads._full for grads in gradients])
    found["sums"] = size([grads.reduced for grads in gradients])
    if len(here) < len(groups):
        found["offloaded, on the host"] = engine.host_memory.bytes_held
    return found

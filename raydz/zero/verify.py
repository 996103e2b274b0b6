"""Self-check: one step's gradients against an unsharded copy of the module that plain torch differentiates.

Neighbours: `engine.py` inherits `StepVerification`. Nothing of the reference goes through raydz's buffers,
hooks or collectives. See "Self-check" in README.md.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from raydz.config import BatchSize
from raydz.errors import ConfigError, LayoutError, TrainingError
from raydz.zero.access import ParameterAccess
from raydz.zero.export import gathered, select, whole_of
from raydz.zero.gradients import GroupGradients
from raydz.zero.sharded import ShardedModel

_FP32_SLACK = 16  # matrix products at another memory alignment may add in another order


@dataclass(frozen=True)
class VerifyReport:
    """How far the engine's gradients are from the reference's.

    Attributes:
        differences: by parameter, the largest difference over the largest magnitude that could have been summed: the
            sum over micro-batches and ranks of each one's largest gradient.
        tolerance: what rounding may do.
    """

    differences: dict[str, float]
    tolerance: float

    @property
    def worst(self) -> str:
        """The parameter that differs most."""
        return max(self.differences, key=lambda name: self.differences[name])


def default_tolerance(sharded: ShardedModel, num_terms: int) -> float:
    """Of a sum of `num_terms` gradients: two roundings to the coarsest dtype on their way, and fp32 additions.

    A native collective (NCCL) sums in the dtype on the wire, so there each addition rounds.

    Raises:
        ConfigError: gradients travel as int8, where the error depends on what else lies in a block.
    """
    if sharded.options.int8.gradients:
        raise ConfigError(
            "int8 gradients have no tolerance of their own", where="verify_step", got="tolerance=None",
            wanted="a tolerance", remedy="give one, or switch zero_quantized_gradients off to verify the rest",
        )  # fmt: skip
    reduction, compute = sharded.options.reduction, sharded.precision.compute_dtype
    on_the_way = (compute, reduction.wire_dtype or compute, reduction.accumulation_dtype)
    coarsest = max(torch.finfo(dtype).eps for dtype in on_the_way)
    rounded = 2 if sharded.comms.reduce.is_gloo or num_terms == 1 else num_terms
    return rounded * coarsest + _FP32_SLACK * num_terms * torch.finfo(torch.float32).eps


class Reference:
    """A plain copy of the sharded module, and its gradients of one step.

    Args:
        names: parameters or modules, by pattern, whose gradients are compared; None for all that are trained.

    Collective: every rank. Memory: the whole model and fp32 gradients of what is compared, on every rank.
    """

    def __init__(self, sharded: ShardedModel, names: Sequence[str] | str | None) -> None:
        self._sharded = sharded
        self.names = [spec.name for spec in select(sharded, names) if spec.parameter.requires_grad]
        with gathered(sharded):
            self.module: nn.Module = copy.deepcopy(sharded.model)
        sharded.precision.install_casts(self.module)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self._parameters = {name: self.module.get_parameter(name).requires_grad_() for name in self.names}
        self._sums = {name: torch.zeros(p.shape, device=p.device) for name, p in self._parameters.items()}
        self._largest = dict.fromkeys(self.names, 0.0)

    def differentiate(self, losses: Iterable[Tensor]) -> None:
        """Add up the gradients of this rank's micro-batches in fp32, then over ranks, by plain torch."""
        for loss in losses:
            if loss.requires_grad:
                loss.backward()
            for name, parameter in self._parameters.items():
                if parameter.grad is not None:
                    self._sums[name] += parameter.grad.float()
                    self._largest[name] += float(parameter.grad.abs().max()) if parameter.numel() else 0.0
                    parameter.grad = None
        group = self._sharded.comms.world.group
        if group is not None:
            for total in self._sums.values():
                dist.all_reduce(total, group=group)

    def compare(self, tolerance: float) -> VerifyReport:
        """Set the engine's reduced gradients against the sums.

        Raises:
            LayoutError: on every rank, a difference above `tolerance`; names parameters.
        """
        wanted, found = set(self.names), dict.fromkeys(self.names, 0.0)
        for grads in self._sharded.gradients:
            if any(spec.name in wanted for spec in grads.group.specs):
                found |= self._differences(grads)
        rows = self._sharded.comms.world.all_gather_values(
            [value for name in self.names for value in (found[name], self._largest[name])]
        )
        report = VerifyReport({name: _relative(rows, 2 * i) for i, name in enumerate(self.names)}, tolerance)
        bad = {name: value for name, value in report.differences.items() if not value <= tolerance}
        if bad:
            named = [f"{name} ({value:.2g})" for name, value in sorted(bad.items(), key=lambda item: -item[1])[:5]]
            raise LayoutError(
                "gradients differ from those of the unsharded module", where=", ".join(named),
                got=f"{len(bad)} of {len(self.names)} parameters above tolerance", wanted=f"at most {tolerance:.2g}",
                remedy="parameters used outside the module they are gathered with (parallel.units), randomness that "
                "torch's generators don't control, or a fault of raydz",
            )  # fmt: skip
        return report

    def _differences(self, grads: GroupGradients) -> dict[str, float]:
        """Largest absolute difference by compared parameter of one flat group. Collective."""
        whole = whole_of(grads.group, grads.sums.float().to(grads.group.device))
        found = {}
        for segment in grads.group.layout.segments:
            if segment.name in self._sums and segment.numel:
                own = whole[segment.start : segment.stop].view(segment.shape)
                found[segment.name] = float((own - self._sums[segment.name]).abs().max())
        return found


def _relative(rows: Sequence[Sequence[float]], column: int) -> float:
    """The largest difference of any rank over the sum of all ranks' largest gradients; infinite where undefined."""
    differences, largest = [row[column] for row in rows], sum(row[column + 1] for row in rows)
    if any(math.isnan(value) for value in differences):
        return math.inf
    worst = max(differences)
    return worst / largest if largest else (math.inf if worst else 0.0)


@contextmanager
def unchanged_surroundings(module: nn.Module, device: torch.device) -> Iterator[Callable[[], None]]:
    """Torch's generators and the module's buffers are as before after the block; calling its value resets them."""
    devices = [device] if device.type == "cuda" else []
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]

    def restore() -> None:
        torch.set_rng_state(cpu)
        for cuda_device, state in cuda.items():
            torch.cuda.set_rng_state(state, cuda_device)

    cpu = torch.get_rng_state()
    cuda = {d: torch.cuda.get_rng_state(d) for d in devices}
    try:
        yield restore
    finally:
        restore()
        for buffer, value in buffers:
            buffer.copy_(value)


def verify_gradients(
    sharded: ShardedModel,
    engine_pass: Callable[[], None],
    reference_losses: Callable[[nn.Module], Iterable[Tensor]],
    names: Sequence[str] | str | None,
    tolerance: float,
) -> VerifyReport:
    """Run a step's micro-batches in the engine and in a plain copy, from the same buffers and random numbers.

    Args:
        engine_pass: leaves reduced gradients.
        reference_losses: what is differentiated of each micro-batch, made by calls of the copy it is given.

    Collective: every rank.

    Raises:
        LayoutError: see `Reference.compare`.
    """
    reference = Reference(sharded, names)
    with unchanged_surroundings(sharded.model, sharded.device) as restore:
        engine_pass()
        restore()
        reference.differentiate(reference_losses(reference.module))
    return reference.compare(tolerance)


class StepVerification(ParameterAccess):
    """The part of the public Engine that checks a step; the engine has the attributes."""

    batch: BatchSize
    __call__: Callable[..., Any]
    backward: Callable[..., Tensor]
    _cast: Callable[[Any], Any]
    _divisor: Callable[[float | None], float]
    _to_differentiate: Callable[[Tensor, float], Tensor]

    def verify_step(
        self,
        loss_fn: Callable[[Callable[..., Any], int], Tensor],
        *,
        names: Sequence[str] | str | None = None,
        denominator: float | None = None,
        tolerance: float | None = None,
    ) -> VerifyReport:
        """Compare the gradients of one step with those of an unsharded copy of the module, and change nothing.

        For small models: every rank holds the whole module, and runs the step's micro-batches twice.

        Args:
            loss_fn: (model, index of the micro-batch) to this rank's loss, by calls of `model(...)`; always the same.
            names: parameters or modules, by pattern, that are compared; None for all that are trained.
            denominator: as of `backward`.
            tolerance: see `VerifyReport.differences`; None for what rounding may do.

        Collective: every rank, between steps.

        Raises:
            LayoutError: on every rank: a difference above the tolerance; names parameters.
            TrainingError: micro-batches of a step have run, or the gradients are not finite.
        """
        self._require_between_steps("a step is verified")
        num_micro, divisor = self.batch.accumulation, self._divisor(denominator)

        def engine_pass() -> None:
            for self._within_step in range(num_micro):
                self.backward(loss_fn(self, self._within_step), denominator=denominator)
            if not self.optimizer.gradient_norm() < float("inf"):
                raise TrainingError("gradients are not finite, so there is nothing to compare")

        def reference_losses(module: nn.Module) -> Iterator[Tensor]:
            def call(*args: Any, **kwargs: Any) -> Any:
                return module(*self._cast(args), **self._cast(kwargs))

            return (self._to_differentiate(loss_fn(call, index), divisor) for index in range(num_micro))

        terms = num_micro * self.world.world_size
        limit = default_tolerance(self.sharded, terms) if tolerance is None else tolerance
        try:
            return verify_gradients(self.sharded, engine_pass, reference_losses, names, limit)
        finally:
            self._within_step = 0
            self.optimizer.clear_gradients()

"""From reduced gradients to new weights: the global norm, the skip decision's number, and the sharded update.

Neighbours: `engine.py` calls these between backward and the next forward; `optim/` has norm, clip and arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.errors import TrainingError
from raydz.ops.reduction import sum_squares
from raydz.optim import Optimizer, combine_norms
from raydz.zero.gradients import GroupGradients
from raydz.zero.group import FlatGroup
from raydz.zero.layout import GroupLayout
from raydz.zero.sharded import ShardedModel


@dataclass(frozen=True)
class Run:
    """Consecutive owned elements with the same settings; offsets count from the start of the owned part."""

    start: int
    stop: int
    weight_decay: float


def plan_runs(layout: GroupLayout, start: int, stop: int, weight_decay: float) -> list[Run]:
    """Cut an owned part where settings change; parameters of fewer than two dimensions have no decay."""
    runs: list[Run] = []
    for part in layout.intervals(start, stop):
        decay = weight_decay if len(part.shape) > 1 else 0.0
        end = part.offset + part.stop - part.start
        if runs and runs[-1].weight_decay == decay:
            runs[-1] = Run(runs[-1].start, end, decay)
        else:
            runs.append(Run(part.offset, end, decay))
    return runs


class ShardedOptimizer:
    """Optimizer states of all trainable groups, and the update that uses them.

    Attributes:
        states: one dict of fp32 tensors (owned,) a trainable group, zero from the start, so that a parameter that
            never gets a gradient is saved and loaded like any other.
    """

    def __init__(self, sharded: ShardedModel, optimizer: Optimizer) -> None:
        self._sharded, self.optimizer = sharded, optimizer
        self.groups: list[FlatGroup] = [grads.group for grads in sharded.gradients]
        self.states: list[dict[str, Tensor]] = [
            {
                name: torch.zeros(group.owned[1] - group.owned[0], dtype=torch.float32, device=group.device)
                for name in optimizer.state_names
            }
            for group in self.groups
        ]
        self._runs = [plan_runs(group.layout, *group.owned, optimizer.weight_decay) for group in self.groups]

    def gradient_norm(self) -> float:
        """Norm of the whole model's gradient, as one process would see it; not finite if any element is not.

        Collective and blocking: every rank, once a step. Units: of the loss's gradient.

        Raises:
            TrainingError: no backward has run since the last step.
        """
        if any(grads.reduced is None for grads in self._sharded.gradients):
            raise TrainingError(
                "a step has no gradients", got="no finished backward since the last step",
                wanted="engine.backward(loss), then engine.step()",
            )  # fmt: skip
        comm = self._sharded.comms.reduce
        local = sum(sum_squares(grads.norm_part()) for grads in self._sharded.gradients)
        return combine_norms(row[0] for row in comm.all_gather_values([local]))

    def non_finite_parameters(self, limit: int = 5) -> list[str]:
        """Names of parameters whose reduced gradients on this rank are not finite."""
        names = [
            part.name
            for grads in self._sharded.gradients
            for part in _owned_parts(grads)
            if not bool(grads.sums[part.offset : part.offset + part.stop - part.start].isfinite().all())
        ]
        return list(dict.fromkeys(names))[:limit]

    def update(self, *, step: int, lr: float, grad_scale: float) -> None:
        """Advance masters, states and compute weights; the gathered copies become stale.

        Args:
            step: number of this step, from 1.
            grad_scale: factor for every gradient (clipping).
        """
        for grads, state, runs in zip(self._sharded.gradients, self.states, self._runs, strict=True):
            for run in runs:
                piece = slice(run.start, run.stop)
                self.optimizer.update(
                    grads.group.weights.slice(run.start, run.stop), grads.sums[piece],
                    {name: tensor[piece] for name, tensor in state.items()},
                    step=step, lr=lr, weight_decay=run.weight_decay, grad_scale=grad_scale,
                )  # fmt: skip
            grads.group.mark_updated()

    def clear_gradients(self) -> None:
        """Drop the step's gradients, taken or skipped."""
        for grads in self._sharded.gradients:
            grads.clear()


def _owned_parts(grads: GroupGradients):
    return grads.group.layout.intervals(*grads.group.owned)

"""From reduced gradients to new weights: the global norm, the skip decision's number, and the sharded update.

Neighbours: `engine.py` calls these between backward and the next forward; `optim/` has norm, clip and arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from raydz.dist.agreement import agree_on_sequences
from raydz.errors import ConfigError, TrainingError
from raydz.ops.reduction import sum_squares
from raydz.optim import AdamW, Muon, Optimizer, combine_norms
from raydz.zero.gradients import GroupGradients
from raydz.zero.group import FlatGroup
from raydz.zero.layout import GroupLayout
from raydz.zero.matrices import MatrixUpdate
from raydz.zero.settings import ParameterSettings, Settings
from raydz.zero.sharded import ShardedModel
from raydz.zero.states import GroupStates


@dataclass(frozen=True)
class Run:
    """Consecutive owned elements with the same settings; offsets count from the start of the owned part."""

    start: int
    stop: int
    settings: ParameterSettings


def plan_runs(layout: GroupLayout, start: int, stop: int, settings: Settings) -> list[Run]:
    """Cut an owned part where settings change."""
    runs: list[Run] = []
    for part in layout.intervals(start, stop):
        its = settings[part.name]
        end = part.offset + part.stop - part.start
        if runs and runs[-1].settings == its:
            runs[-1] = Run(runs[-1].start, end, its)
        else:
            runs.append(Run(part.offset, end, its))
    return runs


class ShardedOptimizer:
    """Optimizer states of all trainable groups, and the update that uses them.

    Attributes:
        group_states: one a trainable group, zero from the start, so that a parameter that never gets a gradient is
            saved and loaded like any other.
    """

    def __init__(self, sharded: ShardedModel, optimizer: Optimizer, settings: Settings) -> None:
        self._sharded, self.optimizer, self._settings = sharded, optimizer, settings
        self.groups: list[FlatGroup] = [grads.group for grads in sharded.gradients]
        self._runs = [plan_runs(group.layout, *group.owned, settings) for group in self.groups]
        self.group_states = [self._states(group, runs) for group, runs in zip(self.groups, self._runs, strict=True)]
        self._matrices = (
            MatrixUpdate(sharded.gradients, self.group_states, settings, sharded.comms.reduce)
            if isinstance(optimizer, Muon)
            else None
        )

    def _states(self, group: FlatGroup, runs: list[Run]) -> GroupStates:
        owned_numel = group.owned[1] - group.owned[0]
        stretches = [(run.start, run.stop, self._state_names(run)) for run in runs]
        return GroupStates(stretches or [(0, owned_numel, self.optimizer.state_names)], owned_numel, group.device)

    def _state_names(self, run: Run) -> tuple[str, ...]:
        if run.settings.is_matrix and isinstance(self.optimizer, Muon):
            return self.optimizer.matrix_state_names
        return self.optimizer.state_names

    def rebuilt(self) -> ShardedOptimizer:
        """The same optimizer over the model's groups as they are now: states of groups that stayed are copied."""
        new = ShardedOptimizer(self._sharded, self.optimizer, self._settings)
        old = dict(zip((id(group) for group in self.groups), self.group_states, strict=True))
        for group, states in zip(new.groups, new.group_states, strict=True):
            for name, tensor in states.tensors.items() if id(group) in old else ():
                tensor.copy_(old[id(group)].tensors[name])
        return new

    def state_kinds(self) -> list[str]:
        """Names of all states that any parameter has."""
        names = set(self.optimizer.state_names)
        return sorted(names | set(self.optimizer.matrix_state_names if isinstance(self.optimizer, Muon) else ()))

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """State tensors by name, one dict a trainable group."""
        return [states.tensors for states in self.group_states]

    def gradient_norm(self) -> float:
        """Norm of the whole model's gradient, as one process would see it; not finite if any element is not.

        Collective and blocking: every rank, once a step. Units: of the loss's gradient.

        Raises:
            TrainingError: no backward has run since the last step; or ranks did different things since the start.
        """
        if any(grads.reduced is None for grads in self._sharded.gradients):
            raise TrainingError(
                "a step has no gradients", got="no finished backward since the last step",
                wanted="engine.backward(loss), then engine.step()",
            )  # fmt: skip
        comm, replica = self._sharded.comms.reduce, self._sharded.comms.replica
        if replica is not None:
            for grads in self._sharded.gradients:
                grads.sum_over_replicas(replica)
        local = sum(sum_squares(grads.norm_part()) for grads in self._sharded.gradients)
        logs = [comm.log, self._sharded.comms.gather.log]
        rows = comm.all_gather_values([local, *(log.digest for log in logs)], what="the gradient norm")
        agree_on_sequences(comm, logs, [row[1:] for row in rows])
        return combine_norms(row[0] for row in rows)

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
        if self._matrices is not None and isinstance(self.optimizer, Muon):
            self._matrices.step(self.optimizer, lr=lr, grad_scale=grad_scale)
        for grads, states, runs in zip(self._sharded.gradients, self.group_states, self._runs, strict=True):
            for run in runs:
                if run.settings.is_matrix:
                    continue
                self.optimizer.update(
                    grads.group.weights.slice(run.start, run.stop), grads.sums[run.start : run.stop],
                    states.of(run.start, run.stop), step=step, lr=lr * run.settings.lr_scale,
                    weight_decay=run.settings.weight_decay, grad_scale=grad_scale,
                )  # fmt: skip
            grads.group.mark_updated()

    def set_betas(self, betas: tuple[float, float] | None) -> None:
        """Betas from now on, where the schedule moves them; None leaves what there is.

        Raises:
            ConfigError: the optimizer has none.
        """
        if betas is None:
            return
        if not isinstance(self.optimizer, AdamW):
            raise ConfigError(
                "the schedule cycles a momentum that this optimizer has not", where="scheduler.params.cycle_momentum",
                got=type(self.optimizer).__name__, wanted="AdamW or Adam", remedy="set cycle_momentum to false",
            )  # fmt: skip
        self.optimizer = replace(self.optimizer, beta1=betas[0], beta2=betas[1])

    def clear_gradients(self) -> None:
        """Drop the step's gradients, taken or skipped."""
        for grads in self._sharded.gradients:
            grads.clear()


def _owned_parts(grads: GroupGradients):
    return grads.group.layout.intervals(*grads.group.owned)

"""From reduced gradients to new weights: the global norm, the skip decision's number, and the sharded update.

Neighbours: `engine.py` calls these between backward and the next forward; `optim/` has norm, clip and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raydz.dist.agreement import agree_on_sequences
from raydz.errors import ConfigError, TrainingError
from raydz.ops.reduction import sum_squares_of_all
from raydz.optim import AdamW, Muon, Optimizer, Part, Update, Widening, combine_norms
from raydz.zero.gradients import GroupGradients
from raydz.zero.group import FlatGroup
from raydz.zero.layout import GroupLayout
from raydz.zero.matrices import MatrixUpdate
from raydz.zero.settings import ParameterSettings, Settings
from raydz.zero.sharded import ShardedModel
from raydz.zero.states import GroupStates


@dataclass(frozen=True)
class Run:
    """Consecutive owned elements with the same settings; offsets count from the start of the owned part.

    Args:
        name, first: the parameter at `start`, and which of its elements is there.
    """

    start: int
    stop: int
    settings: ParameterSettings
    name: str
    first: int

    def cut(self, limit: int) -> Iterator[Run]:
        """The same elements, at most `limit` at a time; within a parameter `name` and `first` stay true."""
        for start in range(self.start, self.stop, limit):
            yield replace(self, start=start, stop=min(start + limit, self.stop), first=self.first + start - self.start)


def plan_runs(layout: GroupLayout, start: int, stop: int, settings: Settings, *, joins: bool = True) -> list[Run]:
    """Cut an owned part where settings change; without `joins` also where a parameter ends."""
    runs: list[Run] = []
    for part in layout.intervals(start, stop):
        its = settings[part.name]
        end = part.offset + part.stop - part.start
        if joins and runs and runs[-1].settings == its:
            runs[-1] = replace(runs[-1], stop=end)
        else:
            runs.append(Run(part.offset, end, its, part.name, part.start))
    return runs


class ShardedOptimizer:
    """Optimizer states of all trainable groups, and the update that uses them.

    Args:
        seed: of what is rounded by chance: bf16 states and bf16 masters.

    Attributes:
        group_states: one a trainable group, zero from the start, so that a parameter that never gets a gradient is
            saved and loaded like any other.
    """

    def __init__(self, sharded: ShardedModel, optimizer: Optimizer, settings: Settings, *, seed: int = 0) -> None:
        self._sharded, self.optimizer, self._settings = sharded, optimizer, settings
        self._seed = seed
        self.groups: list[FlatGroup] = [grads.group for grads in sharded.gradients]
        by_chance = sharded.precision.state_dtype != torch.float32 or not sharded.precision.keeps_rest
        self._widening = Widening.on(sharded.device, seed) if by_chance else None
        self._runs = [
            plan_runs(group.layout, *group.owned, settings, joins=self._widening is None) for group in self.groups
        ]
        self.group_states = [self._states(group, runs) for group, runs in zip(self.groups, self._runs, strict=True)]
        self._matrices = (
            MatrixUpdate(sharded.gradients, self.group_states, settings, sharded.comms.reduce, self._widening)
            if isinstance(optimizer, Muon)
            else None
        )

    def _states(self, group: FlatGroup, runs: list[Run]) -> GroupStates:
        owned_numel = group.owned[1] - group.owned[0]
        stretches = [(run.start, run.stop, self._state_names(run)) for run in runs]
        whole = [(0, owned_numel, self.optimizer.state_names)]
        return GroupStates(stretches or whole, owned_numel, group.device, self._sharded.precision.state_dtype)

    def _state_names(self, run: Run) -> tuple[str, ...]:
        if run.settings.is_matrix and isinstance(self.optimizer, Muon):
            return self.optimizer.matrix_state_names
        return self.optimizer.state_names

    def rebuilt(self) -> ShardedOptimizer:
        """The same optimizer over the model's groups as they are now: states of groups that stayed are copied."""
        new = ShardedOptimizer(self._sharded, self.optimizer, self._settings, seed=self._seed)
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
        local = math.fsum(sum_squares_of_all([grads.norm_part() for grads in self._sharded.gradients]))
        logs = self._sharded.comms.logs
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
            self._matrices.step(self.optimizer, Update(step, lr, grad_scale=grad_scale))
        limit = self._sharded.options.update_numel
        for grads, states, runs in zip(self._sharded.gradients, self.group_states, self._runs, strict=True):
            for run in (part for whole in runs if not whole.settings.is_matrix for part in whole.cut(limit)):
                its = run.settings
                self._update_run(grads, states, run, Update(step, lr * its.lr_scale, its.weight_decay, grad_scale))
            grads.group.mark_updated()

    def _update_run(self, grads: GroupGradients, states: GroupStates, run: Run, now: Update) -> None:
        part = slice(run.start, run.stop)
        weights, state = grads.group.weights.slice(run.start, run.stop), states.of(run.start, run.stop)
        if self._widening is None:
            self.optimizer.update(weights, grads.sums[part], state, now)
        else:
            its = Part(run.name, run.first, now.step)
            self._widening.update(self.optimizer, weights, grads.sums[part], state, now, its)

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

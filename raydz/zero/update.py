"""From reduced gradients to new weights: the global norm, the skip decision's number, and the sharded update.

Neighbours: `engine.py` calls these between backward and the next forward; `optim/` has norm, clip and arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raydz.dist.agreement import agree_on_sequences
from raydz.errors import ConfigError, TrainingError
from raydz.offload.parameters import on_device
from raydz.offload.speculation import OffloadStep
from raydz.ops.reduction import finish_squares
from raydz.optim import AdamW, Muon, Optimizer, Part, Update, WeightShard, Widening, combine_norms
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
        self._group_states = [self._states(group, runs) for group, runs in zip(self.groups, self._runs, strict=True)]
        self._matrices = (
            MatrixUpdate(sharded.gradients, self._group_states, settings, sharded.comms.reduce, self._widening)
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
        self._copy_states_to(new)
        return new

    def _copy_states_to(self, new: ShardedOptimizer) -> None:
        old = dict(zip((id(group) for group in self.groups), self.group_states, strict=True))
        for group, states in zip(new.groups, new.group_states, strict=True):
            for name, tensor in states.tensors.items() if id(group) in old else ():
                tensor.copy_(old[id(group)].tensors[name])

    @property
    def group_states(self) -> list[GroupStates]:
        """One a trainable group, zero from the start, so that a parameter that never gets a gradient is saved and
        loaded like any other; as they are when no update is under way."""
        return self._group_states

    def state_kinds(self) -> list[str]:
        """Names of all states that any parameter has."""
        names = set(self.optimizer.state_names)
        return sorted(names | set(self.optimizer.matrix_state_names if isinstance(self.optimizer, Muon) else ()))

    @property
    def states(self) -> list[dict[str, Tensor]]:
        """State tensors by name, one dict a trainable group."""
        return [states.tensors for states in self.group_states]

    def device_states(self) -> list[Tensor]:
        """Those that are not offloaded; without waiting for anything."""
        return [tensor for states in self._group_states for tensor in states.tensors.values()]

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
        local = math.fsum(finish_squares([grads.squares() for grads in self._sharded.gradients]))
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
        for index, grads in enumerate(self._sharded.gradients):
            self._update_group(index, grads, Update(step, lr, grad_scale=grad_scale))
            grads.group.mark_updated()

    def _update_group(self, index: int, grads: GroupGradients, now: Update) -> None:
        group = grads.group
        with on_device(group.weights, group.device) as weights:
            advance(
                self.optimizer, self._widening, self._runs[index], weights, grads.sums, self._group_states[index], now,
                self._sharded.options.update_numel,
            )  # fmt: skip

    def set_betas(self, betas: tuple[float, float] | None) -> None:
        """Betas from now on, where the schedule moves them; None leaves what there is.

        Raises:
            ConfigError: the optimizer has none.
        """
        self.optimizer = self._with_betas(betas)

    def _with_betas(self, betas: tuple[float, float] | None) -> Optimizer:
        if betas is None:
            return self.optimizer
        if not isinstance(self.optimizer, AdamW):
            raise ConfigError(
                "the schedule cycles a momentum that this optimizer has not", where="scheduler.params.cycle_momentum",
                got=type(self.optimizer).__name__, wanted="AdamW or Adam", remedy="set cycle_momentum to false",
            )  # fmt: skip
        return replace(self.optimizer, beta1=betas[0], beta2=betas[1])

    def clear_gradients(self) -> None:
        """Drop the step's gradients, taken or skipped."""
        for grads in self._sharded.gradients:
            grads.clear()

    # -- where the update runs beside training, see `hosted.py` ----------------------------------------------------

    def expect(
        self, *, step: int, lr: float, grad_scale: float | None, betas: tuple[float, float] | None = None
    ) -> None:
        """A step's last backward begins; this is its update unless it is clipped or skipped. None: not known yet."""

    def finish(self) -> None:
        """Wait until no update is under way."""

    def raise_failure(self) -> None:
        """Raises: OffloadError, if an update beside training has failed."""

    def close(self) -> None:
        """End what runs beside training."""

    def offload_report(self) -> OffloadStep | None:
        """How the step went that was just made; None where nothing is offloaded."""
        return None


def advance(
    optimizer: Optimizer, widening: Widening | None, runs: Sequence[Run], weights: WeightShard, gradient: Tensor,
    states: GroupStates, now: Update, limit: int,
) -> None:  # fmt: skip
    """One step of elements that lie together, run by run, at most `limit` elements at a time.

    Shape: weights, gradient and states (n,). Runs of matrices are left alone.
    """
    for run in (part for whole in runs if not whole.settings.is_matrix for part in whole.cut(limit)):
        its = replace(now, lr=now.lr * run.settings.lr_scale, weight_decay=run.settings.weight_decay)
        part, state = weights.slice(run.start, run.stop), states.of(run.start, run.stop)
        if now.into is not None:
            its = replace(its, into=now.into.slice(run.start, run.stop))
        if widening is None:
            optimizer.update(part, gradient[run.start : run.stop], state, its)
        else:
            where = Part(run.name, run.first, now.step)
            widening.update(optimizer, part, gradient[run.start : run.stop], state, its, where)


def _owned_parts(grads: GroupGradients):
    return grads.group.layout.intervals(*grads.group.owned)

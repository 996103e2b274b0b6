"""The sharded update with masters and states in host memory: groups are units of a pipeline that runs beside training.

Neighbours: `engine.py` makes one in place of `ShardedOptimizer` where the optimizer is offloaded, tells it what update
to expect and waits through `FlatGroup.weights`; `offload/pipeline.py` has the threads. See `offload/README.md`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from raydz.errors import ConfigError
from raydz.offload.hosted_unit import HostedUnit, StepPlan
from raydz.offload.links import Links, Mark
from raydz.offload.options import Hosting
from raydz.offload.pipeline import UpdatePipeline
from raydz.offload.speculation import Judgement, OffloadStep
from raydz.offload.tiers import WEIGHTS, HostTier, Tier, UnitShape, ViewedShard, cut_units
from raydz.ops.batch import Batch
from raydz.ops.native import load as load_kernels
from raydz.ops.operands import Into
from raydz.optim import Muon, Optimizer, Update, WeightShard, Widening
from raydz.zero.gradients import GroupGradients
from raydz.zero.group import FlatGroup
from raydz.zero.settings import Settings
from raydz.zero.sharded import ShardedModel
from raydz.zero.states import GroupStates
from raydz.zero.update import Run, ShardedOptimizer, advance

_HOST = torch.device("cpu")


class HostedOptimizer(ShardedOptimizer):
    """`ShardedOptimizer` whose states, and what masters need beside the weights, are in host memory.

    Args:
        hosting: where and how.

    Raises:
        ConfigError: Muon, whose matrices are updated as wholes.
        OffloadError: the host budget is too small.
    """

    def __init__(
        self, sharded: ShardedModel, optimizer: Optimizer, settings: Settings, *, hosting: Hosting, seed: int = 0
    ) -> None:
        if isinstance(optimizer, Muon):
            raise ConfigError(
                "Muon's matrices are made orthogonal on the device", where="zero_optimization.offload_optimizer",
                got="optimizer.type: Muon", wanted="an elementwise optimizer, such as AdamW or Lion",
                remedy="set offload_optimizer.device to none",
            )  # fmt: skip
        self._hosting = hosting
        self._leaving: deque[tuple[Tensor, Mark]] = deque()
        numels = [grads.group.owned[1] - grads.group.owned[0] for grads in sharded.gradients]
        is_hosted = choose_hosted(numels, hosting.ratio)
        for grads, leaves in zip(sharded.gradients, is_hosted, strict=True):
            if not leaves:
                grads.group.bring_rest()
        shapes = [_shape(i, g.group, optimizer, sharded) for i, g in enumerate(sharded.gradients) if is_hosted[i]]
        self._shapes = cut_units(shapes, None)
        self._tier: Tier = hosting.tier(self._shapes)
        self._units_of: dict[int, list[int]] = {}
        for index, shape in enumerate(self._shapes):
            self._units_of.setdefault(shape.group, []).append(index)
        super().__init__(sharded, optimizer, settings, seed=seed)
        self._position = {id(grads): index for index, grads in enumerate(sharded.gradients)}
        self._host_widening = None if self._widening is None else Widening.on(_HOST, seed)
        self._unit_runs = [_within(self._runs[shape.group], shape.start, shape.stop) for shape in self._shapes]
        units = [self._move_out(index, shape) for index, shape in enumerate(self._shapes)]
        self.pipeline = UpdatePipeline(
            units, self._tier, Links(sharded.device), partial(hosting.memory.empty, pinned=hosting.pinned),
            self._advance, Judgement(hosting.mode),
        )  # fmt: skip
        self.pipeline.add_second_buffers()
        for group, indices in self._units_of.items():
            self.groups[group].source = partial(self._weights_of, group, indices)
            self.groups[group].is_updating = partial(self._is_updating, indices)
            self.groups[group].mark_updated()
        sharded.on_reduced = self._gradient_reduced

    # -- building ----------------------------------------------------------------------------------------------

    def _states(self, group: FlatGroup, runs: list[Run]) -> GroupStates:
        index = next(i for i, grads in enumerate(self._sharded.gradients) if grads.group is group)
        return self._states_of(index) if index in self._units_of else super()._states(group, runs)

    def _states_of(self, group: int) -> GroupStates:
        (index,) = self._units_of[group]
        return GroupStates.over({n: t for n, t in self._tier.view(index).items() if n not in WEIGHTS})

    def _move_out(self, index: int, shape: UnitShape) -> HostedUnit:
        """Copy a unit's weights to the tier; its group keeps what forward reads."""
        group, tensors = self.groups[shape.group], self._tier.fetch(index)
        weights = group.weights.slice(shape.start, shape.stop)
        tensors["home"].copy_(weights.updated)
        for name, kept in (("low", weights.low), ("separate", weights.separate)):
            if kept is not None:
                tensors[name].copy_(kept)
        self._tier.write_back(index)
        shares = self._shares(group)
        if shares and self._sharded.offload is not None:
            self._sharded.offload.give_back(group.weights.compute)
            group.weights = WeightShard(tensors["home"])
        elif shape.stop == group.owned[1] - group.owned[0]:
            group.weights = WeightShard(group.weights.compute)
        if group.is_offloaded and not shares and self._sharded.offload is not None:
            return HostedUnit(shape, None, keep=partial(self._sharded.offload.store, weights.compute))
        return HostedUnit(shape, None if shares else weights.compute)

    def _shares(self, group: FlatGroup) -> bool:
        """Whether forward fetches a group's weights from where they are updated."""
        return group.is_offloaded and isinstance(self._tier, HostTier)

    def _is_updating(self, indices: Sequence[int]) -> bool:
        return not all(self.pipeline.is_at_rest(index) for index in indices)

    def rebuilt(self) -> ShardedOptimizer:
        self.finish()
        new = HostedOptimizer(
            self._sharded, self.optimizer, self._settings, seed=self._seed, hosting=self._hosting
        )  # fmt: skip
        self._copy_states_to(new)
        new.pipeline.judgement = self.pipeline.judgement
        self.close()
        return new

    # -- access ------------------------------------------------------------------------------------------------

    def _weights_of(self, group: int, indices: Sequence[int], own: WeightShard) -> WeightShard:
        for index in indices:
            self.pipeline.await_unit(index)
        (index,) = indices
        if not isinstance(self._tier, HostTier):
            return ViewedShard(own.compute, partial(self._view, index))
        tensors = self._tier.view(index)
        if self._shares(self.groups[group]):
            return WeightShard(tensors["home"], tensors.get("low"), tensors.get("separate"))
        return WeightShard(own.compute, **{name: tensors.get(name) for name in WEIGHTS})

    def _view(self, index: int) -> dict[str, Tensor]:
        self.finish()
        return self._tier.view(index)

    @property
    def group_states(self) -> list[GroupStates]:
        self.finish()
        for group in self._units_of:
            self._group_states[group] = self._states_of(group)
        return self._group_states

    def device_states(self) -> list[Tensor]:
        here = [states for index, states in enumerate(self._group_states) if index not in self._units_of]
        return [tensor for states in here for tensor in states.tensors.values()]

    # -- a step ------------------------------------------------------------------------------------------------

    def expect(
        self, *, step: int, lr: float, grad_scale: float | None, betas: tuple[float, float] | None = None
    ) -> None:
        now = None if grad_scale is None else Update(step, lr, grad_scale=grad_scale)
        self.pipeline.expect(None if now is None else self._plan(self._with_betas(betas), now))

    def _plan(self, optimizer: Optimizer, now: Update) -> StepPlan:
        if hasattr(optimizer, "threads"):
            optimizer = replace(optimizer, threads=self._hosting.threads)  # type: ignore[type-var]
        return StepPlan(optimizer, now)

    def _gradient_reduced(self, grads: GroupGradients) -> None:
        """A group's sum over ranks is there: let it leave, unless other replicas' are still to be added."""
        if self._sharded.comms.replica is None:
            self._send(grads)
            self._give_back(grads)

    def _give_back(self, grads: GroupGradients) -> None:
        """Let the device's memory of sums that are on their way go, one group later."""
        indices = self._units_of.get(self._position[id(grads)], ())
        if len(indices) != 1 or not grads.may_leave:
            return
        host, left = self.pipeline.gradient_of(indices[0])
        self._leaving.append((grads.leave(host, left), left))
        while len(self._leaving) > 1:
            self._leaving.popleft()[1].wait()

    def _send(self, grads: GroupGradients) -> None:
        for index in self._units_of.get(self._position[id(grads)], ()):
            shape = self._shapes[index]
            self.pipeline.gradient_arrived(index, grads.sums[shape.start : shape.stop])

    def update(self, *, step: int, lr: float, grad_scale: float) -> None:
        """Begin to advance masters, states and compute weights; each unit's next use waits for it."""
        now = Update(step, lr, grad_scale=grad_scale)
        if self._sharded.comms.replica is not None:
            for grads in self._sharded.gradients:
                self._send(grads)
        self.pipeline.commit(self._plan(self.optimizer, now))
        for index, grads in enumerate(self._sharded.gradients):
            if index not in self._units_of:
                self._update_group(index, grads, now)
            grads.group.mark_updated()

    def _advance(
        self, index: int, tensors: dict[str, Tensor], gradient: Tensor, plan: StepPlan,
        second: dict[str, Tensor] | None,
    ) -> None:  # fmt: skip
        """One step of a unit, in the pipeline's thread."""
        optimizer, now = plan.optimizer, replace(plan.now, batch=Batch())
        if second is not None and optimizer.takes_noise and load_kernels() is not None:
            now = replace(now, into=_second_operands(second, optimizer))
            if "separate" in tensors:
                tensors = {**tensors, "home": second["home"]}  # it is only written
        elif second is not None:
            for name, tensor in second.items():
                tensor.copy_(tensors[name])
            tensors = second
        states = GroupStates.over({name: tensor for name, tensor in tensors.items() if name not in WEIGHTS})
        weights = WeightShard(tensors["home"], tensors.get("low"), tensors.get("separate"))
        advance(
            optimizer, self._host_widening, self._unit_runs[index], weights, gradient, states, now,
            self._sharded.options.update_numel,
        )  # fmt: skip
        assert now.batch is not None
        now.batch.run(self._hosting.threads)

    def clear_gradients(self) -> None:
        self.pipeline.drop()
        self.pipeline.gradients_left()
        self._leaving.clear()
        super().clear_gradients()

    def finish(self) -> None:
        self.pipeline.finish()

    def raise_failure(self) -> None:
        self.pipeline.raise_failure()

    def close(self) -> None:
        self.pipeline.close()

    def offload_report(self) -> OffloadStep:
        return self.pipeline.report()


def choose_hosted(numels: Sequence[int], ratio: float) -> list[bool]:
    """Which groups leave the device: all but the first ones that fit into a share of 1 - ratio.

    The first ones' gradients come last and their weights are needed first, so that nothing hides their updates.
    """
    room = round((1 - ratio) * sum(numels))
    chosen = []
    for numel in numels:
        chosen.append(numel > room)
        room -= 0 if chosen[-1] else numel
    return chosen


def _second_operands(second: dict[str, Tensor], optimizer: Optimizer) -> Into:
    master = second["separate"] if "separate" in second else second["home"]
    return Into(master, second.get("low"), tuple(second[name] for name in optimizer.state_names))


def _shape(index: int, group: FlatGroup, optimizer: Optimizer, sharded: ShardedModel) -> UnitShape:
    weights = group.weights
    tensors = {"home": weights.compute.dtype}
    tensors |= {n: t.dtype for n, t in (("low", weights.low), ("separate", weights.separate)) if t is not None}
    tensors |= dict.fromkeys(optimizer.state_names, sharded.precision.state_dtype)
    return UnitShape(index, 0, group.owned[1] - group.owned[0], tensors, group.label)


def _within(runs: Sequence[Run], start: int, stop: int) -> list[Run]:
    """The parts of runs that lie in a unit, counted from its start."""
    parts = []
    for run in runs:
        low, high = max(run.start, start), min(run.stop, stop)
        if low < high:
            parts.append(replace(run, start=low - start, stop=high - start, first=run.first + low - run.start))
    return parts

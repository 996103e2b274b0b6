"""A module whose parameters, gradients and optimizer states are sharded as the stage's policy says.

Neighbours: `engine.py` drives it (begin and end of backward, update); `hooks.py` calls `before_forward`,
`after_forward`, `before_backward` and `gradient_ready` as the module runs; `group.py` and `gradients.py` hold the
buffers. What happens when stands in README.md, "One step".
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal
from weakref import WeakSet

import torch
from torch import nn

from raydz.errors import TrainingError
from raydz.offload.parameters import ParameterOffload
from raydz.zero.communicators import Communicators
from raydz.zero.gradients import GroupGradients, refuse_unused
from raydz.zero.group import FlatGroup, ValueSource
from raydz.zero.initialize import UnitValues
from raydz.zero.layout import split_by_numel
from raydz.zero.options import ZeroOptions
from raydz.zero.policy import StagePolicy
from raydz.zero.precision import PrecisionPlan
from raydz.zero.presence import StatePresence
from raydz.zero.schedule import Pass, UseOrder
from raydz.zero.units import ParameterSpec, UnitSpec, find_units

_MAX_REDUCTIONS_IN_FLIGHT = 2
_MOST_READ_AHEAD = 8
Event = Literal["before_forward", "after_forward", "before_backward", "completed", "begin_backward", "end_backward"]
"""What happens to a unit, or (the last two) to all."""


class ForwardCall:
    """One call of a unit's forward. Its graph holds it, so that a graph which is dropped takes it along."""


@dataclass(eq=False)
class Unit:
    """A unit at run time: its flat groups, and what of its backward is still to come."""

    spec: UnitSpec
    groups: list[FlatGroup] = field(default_factory=list)
    gradients: list[GroupGradients] = field(default_factory=list)
    open_calls: WeakSet[ForwardCall] = field(default_factory=WeakSet)
    """Calls whose inputs still wait for their gradients, while their graphs live; only where frozen parameters are."""
    recomputed: ForwardCall | None = None
    """An open call without inputs to follow: it lasts until backward ends."""

    @property
    def numel(self) -> int:
        return sum(group.layout.padded_numel for group in self.groups)

    @property
    def released_numel(self) -> int:
        """Elements that a gather would add to what is live."""
        return sum(g.layout.padded_numel for g in self.groups if not g.keeps_parameters and not g.live_numel)

    @property
    def has_frozen(self) -> bool:
        return any(not group.trainable for group in self.groups)

    @property
    def is_root(self) -> bool:
        return self.spec.name == ""

    @property
    def is_complete(self) -> bool:
        """Whether this backward has nothing more to do with the unit."""
        return all(grads.pending == 0 for grads in self.gradients) and not self.open_calls

    def launch_gather(self) -> None:
        for group in self.groups:
            group.launch_gather()

    def finish_gather(self) -> None:
        for group in self.groups:
            group.finish_gather()

    def release(self) -> None:
        for group in self.groups:
            group.release()


class ShardedModel(StatePresence):
    """Units of a module and what happens to them during a step.

    Args:
        model: its parameters are replaced by views; modules and names stay.
        values: initial fp32 values, unit by unit.
        accumulation: micro-batches of a step.
        offload: where released weights live between uses, if not on the device.
        rest_device: of what masters need beside 16-bit weights: the host, where they are updated there.

    Raises:
        ConfigError: a unit pattern matches nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        policy: StagePolicy,
        comms: Communicators,
        device: torch.device,
        precision: PrecisionPlan,
        options: ZeroOptions,
        values: UnitValues,
        accumulation: int,
        unit_patterns: Sequence[str] | None = None,
        offload: ParameterOffload | None = None,
        rest_device: torch.device | None = None,
    ) -> None:
        self.offload, self._rest_device = offload, rest_device
        self.model, self.policy, self.comms, self.device = model, policy, comms, device
        self.precision, self._accumulation = precision, accumulation
        specs = find_units(model, unit_patterns)
        self.options, self.sizes = options, options.resolved(specs)
        self._persistent = self._choose_persistent(specs)
        self.groups: list[FlatGroup] = []
        self.gradients: list[GroupGradients] = []
        self.accepts_writes = False
        """The module's parameters show masters that may be changed: see `export.modified`."""
        self.units = [Unit(spec) for spec in specs]
        for unit in self.units:
            self._build_groups(unit, values(unit.spec))
        self._order: UseOrder[Unit] = UseOrder()
        self.in_backward = False
        self.on_event: Callable[[Event, Unit | None], None] | None = None
        """Who listens to what happens, see `join.py`."""
        self.on_reduced: Callable[[GroupGradients], None] | None = None
        """Who takes a group's sums of a step as soon as they are whole, see `hosted.py`."""
        self._is_last = False
        self._to_reduce: deque[tuple[Unit, GroupGradients]] = deque()
        self._in_flight: deque[GroupGradients] = deque()

    # -- building ----------------------------------------------------------------------------------------------

    def _build_groups(self, unit: Unit, source: ValueSource) -> None:
        kinds: dict[tuple[bool, bool, torch.dtype], list[ParameterSpec]] = {}
        for p in unit.spec.parameters:
            kind = (not p.parameter.requires_grad, p.name in self._persistent, self.precision.dtype_of(p))
            kinds.setdefault(kind, []).append(p)
        for kind in sorted(kinds, key=lambda kind: kind[:2]):  # trained before frozen, dtypes in module order
            members, (_, persistent, dtype) = kinds[kind], kind
            for run in split_by_numel([p.parameter.numel() for p in members], self.sizes.bucket_numel):
                self._build_group(unit, [members[i] for i in run], persistent, dtype, source)

    def regroup(self, units: Sequence[Unit], source: ValueSource) -> None:
        """Form the flat groups of `units` anew from their parameters' `requires_grad`, with values from `source`.

        Nothing may be gathered or in flight. Groups are numbered anew, alike on all ranks.
        """
        for unit in units:
            for group in unit.groups:
                group.discard()
            unit.groups, unit.gradients = [], []
            self._build_groups(unit, source)
        self.groups = [group for unit in self.units for group in unit.groups]
        self.gradients = [grads for unit in self.units for grads in unit.gradients]
        for index, group in enumerate(self.groups):
            group.index = index

    def _choose_persistent(self, units: Sequence[UnitSpec]) -> set[str]:
        """Names of the small parameters that stay gathered: those that fit, unit by unit, under the most together."""
        chosen: set[str] = set()
        left = -1 if self.policy.keeps_parameters else self.sizes.max_persistent_numel
        for spec in [spec for unit in units for spec in unit.parameters]:
            numel = spec.parameter.numel()
            if numel < self.sizes.persistence_numel and numel <= left:
                chosen.add(spec.name)
                left -= numel
        return chosen

    def _build_group(
        self, unit: Unit, members: list[ParameterSpec], persistent: bool, dtype: torch.dtype, source: ValueSource
    ) -> None:
        int8, may_round = self.options.int8, not persistent and self.precision.may_round(dtype)
        group = FlatGroup(
            len(self.groups), members, dtype=dtype, device=self.device, comm=self.comms.gather,
            policy=self.policy, persistent=persistent, keeps_rest=self.precision.keeps_rest, near=self.comms.near,
            as_int8=may_round and (int8.weights or (int8.frozen and not members[0].parameter.requires_grad)),
            offload=self.offload, rest_device=self._rest_device,
        )  # fmt: skip
        group.fill(source)
        self.groups.append(group)
        unit.groups.append(group)
        if group.trainable:
            grads = GroupGradients(
                group, self.comms.reduce, self.policy, self.options.reduction,
                sums_micro_batches=self._accumulation > 1, num_ranks=self.comms.world.world_size,
                as_int8=may_round and int8.gradients,
            )  # fmt: skip
            self.gradients.append(grads)
            unit.gradients.append(grads)

    # -- gathering ---------------------------------------------------------------------------------------------

    def before_forward(self, unit: Unit) -> None:
        """Gather the unit, and start on those that follow.

        Raises:
            TrainingError: parameters are being changed, or were moved away.
        """
        self.require_present("a forward", "lp_params")
        if self.accepts_writes:
            raise TrainingError(
                "a forward while parameters are being changed", where=unit.spec.name or "the model",
                remedy="leave `with engine.gathered(modify=True)` first",
            )  # fmt: skip
        self._tell("before_forward", unit)
        if unit.is_root and not self.in_backward:
            self._order.begin(Pass.FORWARD if torch.is_grad_enabled() else Pass.EVALUATE)
        self._gather(unit)

    def after_forward(self, unit: Unit) -> None:
        """Release the unit, unless it is used again soon or backward is what recomputes it."""
        self._tell("after_forward", unit)
        if self.in_backward:
            return
        if not (torch.is_grad_enabled() and (unit.is_root or self._is_used_soon(unit))):
            unit.release()

    def _is_used_soon(self, unit: Unit) -> bool:
        """Whether nothing comes before the unit's next use, or so little that it is kept. See "Reuse" in README.md."""
        reuse_numel = self.sizes.reuse_numel
        distance = self._order.distance(unit, lambda other: 0 if other.is_root else other.numel, reuse_numel)
        if not distance:
            return distance == 0
        between = distance // 2  # used forth and back, and kept too
        kept = self.units[0].numel + unit.numel + between
        released = [group.layout for group in self.groups if not group.keeps_parameters]
        room = sum(layout.padded_numel - layout.shard_numel for layout in released)
        return kept <= min(room, self.sizes.max_live_numel)

    def before_backward(self, unit: Unit) -> None:
        """Gather the unit again for the gradients of its inputs.

        Raises:
            TrainingError: backward was not declared through the engine.
        """
        self._require_declared()
        self._tell("before_backward", unit)
        if not unit.spec.is_lookup:
            self._gather(unit)

    def _gather(self, unit: Unit) -> None:
        following = self._order.advance(unit)
        if self.options.overlaps:
            unit.launch_gather()
        ahead = 0
        for next_unit in following:
            is_full = self._live_numel() + next_unit.released_numel > self.sizes.max_live_numel
            if ahead >= self.sizes.prefetch_numel or is_full:
                break
            if not (self.in_backward and next_unit.spec.is_lookup):
                next_unit.launch_gather()
            ahead += next_unit.numel
        if self.offload is not None and self.offload.disk is not None:
            self._read_ahead(following)
        unit.finish_gather()

    def _read_ahead(self, following: Sequence[Unit]) -> None:
        """Let a disk read what comes next, as far as there are buffers."""
        for next_unit in following[:_MOST_READ_AHEAD]:
            if not (self.in_backward and next_unit.spec.is_lookup):
                for group in next_unit.groups:
                    group.read_ahead()

    def _live_numel(self) -> int:
        return sum(group.live_numel for group in self.groups)

    def release_all(self) -> None:
        """Give back whatever is gathered and need not stay."""
        for unit in self.units:
            unit.release()

    # -- backward ----------------------------------------------------------------------------------------------

    def begin_backward(self, *, is_last: bool) -> None:
        """Declare a backward; `is_last` says that it is the step's last and its gradients are reduced.

        Raises:
            TrainingError: the last backward has not ended.
        """
        self.require_present("a backward")
        if self.in_backward:
            raise TrainingError("backward was declared twice", remedy="call engine.backward once for each forward")
        self._tell("begin_backward", None)
        self.in_backward, self._is_last = True, is_last
        self._order.begin(Pass.BACKWARD)
        for grads in self.gradients:
            grads.arm()
        self._to_reduce = deque(
            (unit, grads)
            for unit in reversed(self.units)
            for grads in reversed(unit.gradients)
            if is_last or grads.reduces_each_micro_batch
        )

    def gradient_ready(self, unit: Unit, grads: GroupGradients, index: int, parameter: nn.Parameter) -> None:
        """Autograd has finished one parameter: take its gradient, and start what has become possible.

        Raises:
            TrainingError: backward was not declared; a second gradient came for a group whose reduction runs; or the
                parameter was used without its unit, so with old values.
        """
        grad, parameter.grad = parameter.grad, None
        self._require_declared()
        group = grads.group
        if not group.is_gathered and (group.keeps_parameters or not unit.spec.is_lookup):
            raise TrainingError(
                "a parameter was used outside the forward of the module it is gathered with, so with old values",
                where=group.specs[index].name, wanted=f"a call of {unit.spec.name or 'the model'}",
                remedy="call the module, or set parallel.units so that a module around its use is the unit",
            )  # fmt: skip
        assert grad is not None  # autograd has just accumulated it
        grads.accumulate(index, grad)
        self.unit_progressed(unit)

    def unit_progressed(self, unit: Unit) -> None:
        """Release a unit that backward is done with, and reduce in the agreed order as far as that goes."""
        if not unit.is_complete:
            return
        self._tell("completed", unit)
        unit.release()
        while self._to_reduce and self._to_reduce[0][0].is_complete:
            self._launch_next_reduction()

    def complete_without_gradients(self, unit: Unit) -> None:
        """Let a unit contribute zeros to this backward, as `gradient_ready` of all its parameters would gradients."""
        for grads in unit.gradients:
            grads.pass_over()
        unit.open_calls.clear()
        self.unit_progressed(unit)

    def _tell(self, event: Event, unit: Unit | None) -> None:
        if self.on_event is not None:
            self.on_event(event, unit)

    def _launch_next_reduction(self) -> None:
        _, grads = self._to_reduce.popleft()
        grads.launch_reduce()
        self._in_flight.append(grads)
        overlaps = self.options.overlaps and grads.comm.world_size > 1
        while len(self._in_flight) > (_MAX_REDUCTIONS_IN_FLIGHT if overlaps else 0):
            self._finish_oldest_reduction()

    def _finish_oldest_reduction(self) -> None:
        grads = self._in_flight.popleft()
        grads.finish_reduce()
        if self._is_last and self.on_reduced is not None:
            self.on_reduced(grads)

    def end_backward(self) -> None:
        """Reduce what no hook completed (parameters without a gradient give zeros) and release everything.

        Raises:
            TrainingError: on every rank, parameters without a gradient where the options refuse them.
        """
        for unit in self.units:
            unit.recomputed = None
        while self._to_reduce:
            self._launch_next_reduction()
        while self._in_flight:
            self._finish_oldest_reduction()
        self.release_all()
        self._tell("end_backward", None)
        if self.options.refuses_unused:
            refuse_unused(self.gradients, self.comms.world)
        self.in_backward = False

    def abort(self) -> None:
        """After an exception: forget this step's gradients without communication and return to the sharded state."""
        self.in_backward = False
        self._to_reduce.clear()
        self._in_flight.clear()
        for unit in self.units:
            unit.recomputed = None
        for grads in self.gradients:
            grads.drop()

    def _require_declared(self) -> None:
        if not self.in_backward:
            raise TrainingError(
                "backward ran without being declared", wanted="engine.backward(loss)",
                remedy="replace loss.backward() by engine.backward(loss), which knows when backward ends",
            )  # fmt: skip

"""A flat group: parameters that are gathered, reduced and updated together, as views of one buffer.

Neighbours: `sharded.py` owns the groups; `layout.py` has the table; `gradients.py` holds the gradient side;
`dist/collectives.py` moves the bytes. See "Zero copy" and "Freeing" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from raydz.dist import Communicator, Handle
from raydz.errors import LayoutError
from raydz.optim import WeightShard
from raydz.zero.gathering import WeightGathering
from raydz.zero.layout import GroupLayout
from raydz.zero.policy import StagePolicy
from raydz.zero.units import ParameterSpec

ValueSource = Callable[[ParameterSpec, int, int], Tensor]
"""(parameter, start, stop) -> values of its flattened elements [start, stop), fp32 or of the parameter's own dtype."""


class FlatGroup:
    """The parameter side of a group: gathered buffer, shard, placeholders.

    Args:
        index: position among all groups of the engine, equal on all ranks; names its messages.
        specs: parameters of one (dtype, trainable) in module order. Their Parameters are replaced by ones of
            `dtype` on `device` whose `.data` are views of the gathered buffer, or NaN placeholders while released.
        persistent: stays gathered after use whatever the policy says.
        keeps_rest: of bf16 weights to their fp32 masters; else they are the masters.
        near: of ranks that keep a second copy of what is released, see `gathering.py`.
        as_int8: what is released travels as int8.

    Attributes:
        weights: this rank's part of masters and compute weights (all of them where the policy shards no state).
        is_gathered: the views hold current values.
    """

    def __init__(
        self,
        index: int,
        specs: Sequence[ParameterSpec],
        *,
        dtype: torch.dtype,
        device: torch.device,
        comm: Communicator,
        policy: StagePolicy,
        persistent: bool,
        keeps_rest: bool = True,
        near: Communicator | None = None,
        as_int8: bool = False,
    ) -> None:
        self.index, self.specs, self.comm = index, list(specs), comm
        self.label = specs[0].name + (f" (+{len(specs) - 1})" if len(specs) > 1 else "")
        self.layout = GroupLayout.of([(s.name, tuple(s.parameter.shape)) for s in specs], comm.world_size)
        self.trainable = specs[0].parameter.requires_grad
        self.dtype, self.device = dtype, device
        self.keeps_parameters = policy.keeps_parameters or persistent or comm.world_size == 1
        # Frozen weights that every rank keeps are whole everywhere: there is nothing to gather.
        is_whole = not policy.shards_state if self.trainable else self.keeps_parameters
        self.owned = (0, self.layout.padded_numel) if is_whole else self.layout.shard_range(comm.rank)
        self.full = torch.zeros(self.layout.padded_numel, dtype=dtype, device=device)
        self._full_bytes = self.full.untyped_storage().nbytes()
        start, stop = self.owned
        compute = self.full[start:stop] if self.keeps_parameters else torch.zeros_like(self.full[start:stop])
        self.weights = WeightShard.around(compute, keeps_rest=keeps_rest) if self.trainable else WeightShard(compute)
        self.is_gathered = False
        self.gathering = None if self.keeps_parameters else WeightGathering(self.full, comm, near, as_int8=as_int8)
        self._handle: Handle | None = None
        self._views = [self.full[s.start : s.stop].view(s.shape) for s in self.layout.segments]
        nan = torch.full((1,), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self._placeholders = [nan.expand(view.numel()).view(view.shape) for view in self._views]
        self.parameters = [self._adopt(spec, view) for spec, view in zip(self.specs, self._views, strict=True)]
        if not self.keeps_parameters:
            self.release()

    def _adopt(self, spec: ParameterSpec, view: Tensor) -> nn.Parameter:
        """Give the Parameter this group's memory; one on another device is replaced wherever it is registered.

        `.data =` keeps the Parameter's own version counter, where `Parameter(view)` would share the buffer's, and
        every gather would look to autograd like a change of the weights.
        """
        if spec.parameter.device != self.device:
            shell = torch.empty(0, dtype=self.dtype, device=self.device)
            spec.replace(nn.Parameter(shell, requires_grad=spec.parameter.requires_grad))
        spec.parameter.data = view
        return spec.parameter

    def fill(self, source: ValueSource) -> None:
        """Set the owned weights from exact values; the others' parts arrive with the next gather."""
        start, stop = self.owned
        by_name = {spec.name: spec for spec in self.specs}
        for part in self.layout.intervals(start, stop):
            values = source(by_name[part.name], part.start, part.stop)
            if values.numel() != part.stop - part.start:
                raise LayoutError(
                    "initial values have the wrong size", where=part.name, got=values.numel(),
                    wanted=part.stop - part.start,
                )  # fmt: skip
            self.weights.slice(part.offset, part.offset + part.stop - part.start).store(values.reshape(-1))
        self.mark_updated()

    @property
    def is_own_master(self) -> bool:
        """Whether bf16 weights are trained without a rest that makes them fp32."""
        return self.trainable and self.dtype == torch.bfloat16 and self.weights.low is None

    @property
    def is_gathering(self) -> bool:
        return self._handle is not None

    @property
    def live_numel(self) -> int:
        """Elements of the gathered buffer that exist now beyond what the policy always keeps."""
        return 0 if self.keeps_parameters or not self.full.untyped_storage().nbytes() else self.layout.padded_numel

    def launch_gather(self) -> None:
        """Start to fill the gathered buffer, unless it is filled or being filled. Collective, in any order."""
        if self.is_gathered or self._handle is not None:
            return
        tag = self.index + 1
        if self.gathering is not None:
            self.full.untyped_storage().resize_(self._full_bytes)
            self._handle = self.gathering.launch(self.full, self.weights.compute, tag=tag, what=self.label)
        elif self.owned == (0, self.layout.padded_numel):
            self._handle = Handle([], self.comm.clock)
        else:
            self._handle = self.comm.all_gather_flat(self.full, tag=tag, what=self.label)

    def finish_gather(self) -> None:
        """Wait for the gather and let every Parameter show its values."""
        if self.is_gathered:
            return
        self.launch_gather()
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        if not self.keeps_parameters:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        self.is_gathered = True

    def release(self) -> None:
        """Give the gathered buffer back; the Parameters show NaN until the next gather.

        Where it is kept, only a gather under way is awaited: one that was launched ahead for a unit which then was
        not used must not end after the update, with the weights of before.
        """
        if self.keeps_parameters:
            if self._handle is not None:
                self.finish_gather()
            return
        if self._handle is not None:
            self._handle.wait()
            self._handle = None
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder
        if not self.full.untyped_storage().resizable():
            self._renew_buffer()
        self.full.untyped_storage().resize_(0)
        self.is_gathered = False

    def _renew_buffer(self) -> None:
        """Leave the buffer to who holds a numpy array of a parameter, which pins its storage, and take another one."""
        self.full = torch.empty_like(self.full)
        self._views = [self.full[s.start : s.stop].view(s.shape) for s in self.layout.segments]

    def lend(self, whole: Tensor) -> None:
        """Let the Parameters be views of `whole`, (padded_numel,), until `take_back`."""
        for parameter, s in zip(self.parameters, self.layout.segments, strict=True):
            parameter.data = whole[s.start : s.stop].view(s.shape)
        self.is_gathered = True

    def take_back(self) -> None:
        """End `lend`; what the buffers hold counts as changed."""
        homes = self._views if self.keeps_parameters else self._placeholders
        for parameter, home in zip(self.parameters, homes, strict=True):
            parameter.data = home
        self.mark_updated()

    def mark_updated(self) -> None:
        """The owned weights changed: others' copies are stale, and graphs built before must not be used.

        Raising every Parameter's version makes a backward through an old graph an error instead of a wrong gradient.
        """
        self.is_gathered = self.keeps_parameters and self.owned == (0, self.layout.padded_numel)
        if self.gathering is not None:
            self.gathering.forget()
        torch.autograd.graph.increment_version(self.parameters)

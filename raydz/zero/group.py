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
from raydz.offload.parameters import ParameterOffload
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
        offload: keeps what the rank owns of it in host memory, also where there is one rank.
        rest_device: of what masters need beside the weights; None: with them.

    Attributes:
        source: where masters are updated in host memory: gives the owned weights, after an update under way.
        is_updating: whether `source` would wait now.
        is_gathered: the views hold current values.
        is_offloaded: what the rank owns is in host memory.
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
        offload: ParameterOffload | None = None,
        rest_device: torch.device | None = None,
    ) -> None:
        self.index, self.specs, self.comm = index, list(specs), comm
        self.label = specs[0].name + (f" (+{len(specs) - 1})" if len(specs) > 1 else "")
        self.layout = GroupLayout.of([(s.name, tuple(s.parameter.shape)) for s in specs], comm.world_size)
        self.trainable = specs[0].parameter.requires_grad
        self.dtype, self.device = dtype, device
        is_alone = comm.world_size == 1 and offload is None
        self.keeps_parameters = policy.keeps_parameters or persistent or is_alone
        # Frozen weights that every rank keeps are whole everywhere: there is nothing to gather.
        is_whole = not policy.shards_state if self.trainable else self.keeps_parameters
        self.owned = (0, self.layout.padded_numel) if is_whole else self.layout.shard_range(comm.rank)
        self.full = torch.zeros(self.layout.padded_numel, dtype=dtype, device=device)
        self._full_bytes = self.full.untyped_storage().nbytes()
        start, stop = self.owned
        if self.keeps_parameters:
            compute = self.full[start:stop]
        elif offload is not None:
            compute = offload.shard(stop - start, dtype, self.label)
        else:
            compute = torch.zeros_like(self.full[start:stop])
        self._weights = WeightShard(compute)
        if self.trainable:
            self._weights = WeightShard.around(compute, keeps_rest=keeps_rest, device=rest_device or device)
        self.source: Callable[[WeightShard], WeightShard] | None = None
        self.is_gathered = False
        self.is_offloaded, self._offload = offload is not None and not self.keeps_parameters, offload
        self.is_updating: Callable[[], bool] | None = None
        self.gathering = None
        if not self.keeps_parameters:
            travels_as_int8 = as_int8 and comm.world_size > 1
            self.gathering = WeightGathering(self.full, comm, near, as_int8=travels_as_int8, offload=offload)
        self._handle: Handle | None = None
        self._was_gathered = False
        self._views = [self.full[s.start : s.stop].view(s.shape) for s in self.layout.segments]
        nan = torch.full((1,), torch.nan if dtype.is_floating_point else 0, dtype=dtype, device=device)
        self._placeholders = [nan.expand(view.numel()).view(view.shape) for view in self._views]
        self.parameters = [self._adopt(spec, view) for spec, view in zip(self.specs, self._views, strict=True)]
        if not self.keeps_parameters:
            self.release()

    @property
    def weights(self) -> WeightShard:
        """This rank's part of masters and compute weights (all of them where the policy shards no state), newest."""
        newest = self._newest()
        if self._offload is not None and self.is_offloaded:
            self._offload.land(newest.compute)
        return newest

    @weights.setter
    def weights(self, weights: WeightShard) -> None:
        self._weights = weights

    def _newest(self) -> WeightShard:
        return self._weights if self.source is None else self.source(self._weights)

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
    def is_whole(self) -> bool:
        """Whether this rank owns all of the group, in the buffer that forward reads."""
        return self.keeps_parameters and self.owned == (0, self.layout.padded_numel)

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
            self._handle = self.gathering.launch(self.full, self._newest().compute, tag=tag, what=self.label)
        elif self.owned == (0, self.layout.padded_numel):
            self._handle = Handle([], self.comm.clock)
        else:
            self._await_update()
            self._handle = self.comm.all_gather_flat(self.full, tag=tag, what=self.label)

    def read_ahead(self) -> None:
        """The group will be gathered soon: what lies on a disk may be read now. Local."""
        if self._offload is None or not self.is_offloaded or self.is_gathered or self._handle is not None:
            return
        if self.is_updating is None or not self.is_updating():
            self._offload.read_ahead(self._weights.compute)

    def finish_gather(self) -> None:
        """Wait for the gather and let every Parameter show its values."""
        if self.is_gathered:
            return
        self.launch_gather()
        if self._handle is not None:
            if self.gathering is not None:
                self.gathering.await_fetch()
            self._handle.wait()
            self._handle = None
        self._await_update()
        if not self.keeps_parameters:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        self.is_gathered = True

    def _await_update(self) -> None:
        if self.source is not None:
            self.source(self._weights)

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

    def bring_rest(self) -> None:
        """What masters need beside the weights belongs on the device after all, and is updated there."""
        newest, compute = self.weights, self._weights.compute
        is_tiers = self.source is not None and self.is_offloaded
        if is_tiers and self._offload is not None and not self._offload.is_on_disk(compute):
            compute = self._offload.shard(compute.numel(), self.dtype, self.label)
            compute.copy_(newest.updated)
        low, separate = (None if t is None else t.to(self.device, copy=True) for t in (newest.low, newest.separate))
        self._weights, self.source, self.is_updating = WeightShard(compute, low, separate), None, None

    def discard(self) -> None:
        """Another group has the parameters from now on."""
        if self._offload is None or not self.is_offloaded:
            return
        if self.source is None or self._offload.is_on_disk(self._weights.compute):
            self._offload.give_back(self._weights.compute)

    def weight_buffers(self) -> list[Tensor]:
        """Memory of the weights as forward reads them: the owned part, what is gathered, a second copy."""
        second = self.gathering.second if self.gathering is not None else None
        return [self._weights.compute, self.full, *([second.values] if second is not None else [])]

    def hide(self) -> None:
        """The weights' memory is given away: let the Parameters show NaN until `show`."""
        for parameter, placeholder in zip(self.parameters, self._placeholders, strict=True):
            parameter.data = placeholder
        self._was_gathered, self.is_gathered = self.is_gathered, False

    def show(self) -> None:
        """End `hide`; nothing has changed."""
        if self.keeps_parameters:
            for parameter, view in zip(self.parameters, self._views, strict=True):
                parameter.data = view
        self.is_gathered = self._was_gathered

    def mark_updated(self) -> None:
        """The owned weights changed: others' copies are stale, and graphs built before must not be used.

        Raising every Parameter's version makes a backward through an old graph an error instead of a wrong gradient.
        """
        self.is_gathered = self.is_whole and self.source is None
        if self.gathering is not None:
            self.gathering.forget()
        if self._offload is not None and self.is_offloaded:
            self._offload.forget(self._weights.compute)
        torch.autograd.graph.increment_version(self.parameters)

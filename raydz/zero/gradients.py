"""The gradient side of a flat group: a flat buffer that backward fills, and the reduced part this rank needs.

Neighbours: `hooks.py` calls `accumulate` as autograd finishes a parameter; `sharded.py` launches reductions in one
agreed order. See "Gradients" in README.md.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from raydz.dist import Communicator, Handle
from raydz.errors import TrainingError
from raydz.offload.links import REACHED, Mark
from raydz.ops.reduction import begin_squares
from raydz.zero.group import FlatGroup
from raydz.zero.options import ReduceOptions
from raydz.zero.policy import StagePolicy


class GroupGradients:
    """Full gradients while a backward fills them; their sum over ranks afterwards.

    Args:
        comm: the reducing communicator.
        sums_micro_batches: more than one micro-batch is added up, in the accumulation dtype: in the full buffer, which
            else has the compute dtype, or where that is reduced each time in `reduced`.
        num_ranks: of all that gradients are averaged over.
        as_int8: what travels is rounded to int8 blocks, whatever dtype it would have.

    Attributes:
        pending: parameters that this backward has not reached yet.
        is_launched: this backward's reduction has been launched.
        reduced: (owned,) the sum over ranks (and micro-batches), None before the first reduction of a step; fp32, but
            where it adds up in another accumulation dtype, or is a single rank's full buffer.
    """

    def __init__(
        self,
        group: FlatGroup,
        comm: Communicator,
        policy: StagePolicy,
        options: ReduceOptions,
        *,
        sums_micro_batches: bool,
        num_ranks: int,
        as_int8: bool = False,
    ) -> None:
        self.group, self.comm, self._policy = group, comm, policy
        self._wire_dtype = None if as_int8 else options.wire_dtype
        alone = comm.world_size == 1
        self._keeps = policy.keeps_gradients or alone
        summed = options.accumulation_dtype if sums_micro_batches else None
        self._dtype = (summed if self._keeps else None) or group.dtype
        self._shard_dtype = (summed if not self._keeps else None) or (
            torch.bfloat16 if group.is_own_master else torch.float32
        )
        # The loss is divided by the number of ranks; what belongs after the reduction is multiplied in again before.
        self._wire_scale = 1.0 if options.predivide_factor is None else num_ranks / options.predivide_factor
        self._as_int8 = as_int8
        self._by_all_reduce = options.by_all_reduce and policy.shards_state  # without, it is one anyway: _spread
        self._arriving: Tensor | None = None
        self._squares: Tensor | None = None
        self._left: Mark = REACHED
        self._full: Tensor | None = None
        self._filled = [False] * len(group.parameters)
        self._handle: Handle | None = None
        self._seen = [False] * len(group.parameters)
        self.pending = 0
        self.is_launched = False
        self.reduced: Tensor | None = None

    @property
    def sums(self) -> Tensor:
        """`reduced`, once there is one."""
        assert self.reduced is not None, "no reduction since the step began"
        self._left.synchronize()
        return self.reduced

    @property
    def buffer(self) -> Tensor | None:
        """The full gradients' memory, where there is any now."""
        return self._full

    @property
    def reduces_each_micro_batch(self) -> bool:
        return not self._keeps

    def arm(self) -> None:
        """A backward begins: every parameter of the group may still get a gradient."""
        self._return()
        if self.reduced is not None and not self._policy.shards_state and self.comm.world_size > 1:
            # Not the step's first: its sum adds to this rank's shard, which must leave the buffer that fills now.
            self.reduced = self.norm_part().clone()
        self._seen = [False] * len(self._filled)
        self.pending = len(self._filled)
        self.is_launched = False

    def accumulate(self, index: int, grad: Tensor) -> None:
        """Add one parameter's gradient.

        Raises:
            TrainingError: the group's reduction in this backward has been launched already.
        """
        if self.is_launched:
            raise TrainingError(
                "a gradient came after its flat group was reduced", where=self.group.specs[index].name,
                wanted="one gradient for each parameter in a backward",
                remedy="use torch.utils.checkpoint with use_reentrant=False",
            )  # fmt: skip
        full = self._full if self._full is not None else self._allocate()
        segment = self.group.layout.segments[index]
        view = full[segment.start : segment.stop].view(segment.shape)
        if self._filled[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            self._filled[index] = True
        self.pending -= not self._seen[index]
        self._seen[index] = True

    def pass_over(self) -> None:
        """This backward gives the group no gradient on this rank, and need not."""
        self.pending = 0
        self._seen = [True] * len(self._seen)

    def _allocate(self) -> Tensor:
        self._full = torch.empty(self.group.layout.padded_numel, dtype=self._dtype, device=self.group.device)
        for start, stop in self.group.layout.gaps():
            self._full[start:stop].zero_()
        return self._full

    def launch_reduce(self) -> None:
        """Start to sum the full gradients over ranks; parameters without one contribute zeros. Collective, in order."""
        self.is_launched = True
        full = self._full if self._full is not None else self._allocate()
        for segment, filled in zip(self.group.layout.segments, self._filled, strict=True):
            if not filled:
                full[segment.start : segment.stop].zero_()
        if self.comm.world_size == 1:
            self.reduced = full
            return
        if self._wire_scale != 1:
            full.mul_(self._wire_scale)
        sent = full if self._wire_dtype is None else full.to(self._wire_dtype)
        is_direct = self.reduced is not None and self._wire_scale == 1 and self._shard_dtype == torch.float32
        numel = full.numel() // self.comm.world_size
        arriving = self.sums if is_direct else torch.empty(numel, dtype=torch.float32, device=full.device)
        reduce = self.comm.all_reduce_to_shard if self._by_all_reduce else self.comm.reduce_scatter_flat
        reduce = self.comm.reduce_scatter_int8 if self._as_int8 else reduce
        self._handle = reduce(sent, arriving, accumulate=is_direct, what=self.group.label)
        self._arriving = arriving

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if any, and give the full buffer back or mark it empty."""
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        self._add_arrived()
        self._filled = [False] * len(self._filled)
        if self._policy.frees_gradients:
            self._full = None
        if not self._policy.shards_state:
            self._spread()

    def _add_arrived(self) -> None:
        """Add one reduction's sum to the step's, unless it was added as it arrived."""
        arrived, self._arriving = self._arriving, None
        assert arrived is not None  # set with the handle
        if self._wire_scale != 1:
            arrived.div_(self._wire_scale)
        if self.reduced is None:
            self.reduced = arrived.to(self._shard_dtype)
        elif self.reduced is not arrived:
            self.reduced.add_(arrived)

    def unused(self) -> list[str]:
        """Names of parameters that this backward, or the last one, gave no gradient."""
        return [spec.name for spec, seen in zip(self.group.specs, self._seen, strict=True) if not seen]

    def _spread(self) -> None:
        """Stage 0: every rank needs the whole sum, so the reduced shards are gathered in fp32."""
        shard, whole = self.sums, self._full
        if whole is None or whole.dtype != torch.float32:
            whole = torch.empty(shard.numel() * self.comm.world_size, dtype=torch.float32, device=shard.device)
        whole[self.comm.rank * shard.numel() : (self.comm.rank + 1) * shard.numel()] = shard
        self.comm.all_gather_flat(whole, tag=self.group.index + 1, what=self.group.label).wait()
        self.reduced = whole

    def sum_over_replicas(self, replica: Communicator) -> None:
        """Add the sums of the other replicas, in fp32. Collective over the ranks with this shard, once a step."""
        self.reduced = self.sums.float()
        replica.all_reduce_flat(self.reduced)

    def norm_part(self) -> Tensor:
        """The part of `reduced` that this rank counts in the global norm: every element once over all ranks."""
        if self._policy.shards_state or self.comm.world_size == 1:
            return self.sums
        start, stop = self.group.layout.shard_range(self.comm.rank)
        return self.sums[start:stop]

    def squares(self) -> Tensor:
        """What the group adds to the global norm, for `ops.finish_squares`."""
        return begin_squares(self.norm_part()) if self._squares is None else self._squares

    @property
    def may_leave(self) -> bool:
        """Whether the sums' memory is given back after the step anyway."""
        return self._policy.frees_gradients

    def leave(self, host: Tensor, left: Mark) -> Tensor:
        """A step's sums are on their way to `host`, which stands for them from now on.

        Returns:
            Their memory on the device, to be held until `left` is reached.
        """
        self._squares = self.squares()
        sums, self.reduced, self._left, self._full = self.sums, host, left, None
        self._filled = [False] * len(self._filled)
        return sums

    def _return(self) -> None:
        """One more backward adds to what had left."""
        if self._squares is None:
            return
        self.reduced = self.sums.to(self.group.device, copy=True)
        self._squares, self._left = None, REACHED
        if self.comm.world_size == 1:
            self._full, self._filled = self.reduced, [True] * len(self._filled)

    def clear(self) -> None:
        """The step is over, taken or skipped: nothing of it may leak into the next."""
        self.finish_reduce()
        self.drop()

    def drop(self) -> None:
        """Forget everything without waiting for anybody."""
        self._handle = self._arriving = self._squares = None
        self._left = REACHED
        self._filled = [False] * len(self._filled)
        self.reduced = None
        if self._policy.frees_gradients and not (self.comm.world_size == 1 and self.group.keeps_parameters):
            self._full = None


def refuse_unused(gradients: Sequence[GroupGradients], comm: Communicator) -> None:
    """Compare with all ranks whether every parameter got a gradient in this backward. Collective.

    Raises:
        TrainingError: on every rank, where any misses one; names parameters and ranks.
    """
    mine = "\n".join(name for grads in gradients for name in grads.unused())
    everyone = [part.decode().split() for part in comm.all_gather_bytes(mine.encode())]
    names = list(dict.fromkeys(name for part in everyone for name in part))
    if names:
        raise TrainingError(
            f"{len(names)} parameters got no gradient", where=", ".join(names[:20]),
            got=f"on ranks {[rank for rank, part in enumerate(everyone) if part]}",
            wanted="each one used for the loss, since zero_optimization.ignore_unused_parameters is false",
            remedy="use or freeze them, or set the key to true: they then contribute zeros",
        )  # fmt: skip

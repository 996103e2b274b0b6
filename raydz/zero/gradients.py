"""The gradient side of a flat group: a flat buffer that backward fills, and the reduced part this rank needs.

Neighbours: `hooks.py` calls `accumulate` as autograd finishes a parameter; `sharded.py` launches reductions in one
agreed order. See "Gradients" in README.md.
"""

from __future__ import annotations

import torch
from torch import Tensor

from raydz.dist import Communicator, Handle
from raydz.errors import TrainingError
from raydz.zero.group import FlatGroup
from raydz.zero.policy import StagePolicy


class GroupGradients:
    """Full gradients while a backward fills them; their sum over ranks afterwards.

    Args:
        comm: the reducing communicator.
        sums_micro_batches: more than one micro-batch is added up in the full buffer, which is then fp32; else it has
            the compute dtype.
        wire_dtype: dtype that travels, None for the buffer's own.

    Attributes:
        pending: parameters that this backward has not reached yet.
        is_launched: this backward's reduction has been launched.
        reduced: (owned,) the sum over ranks (and micro-batches), fp32 unless a single rank keeps compute dtype;
            None before the first reduction of a step.
    """

    def __init__(
        self,
        group: FlatGroup,
        comm: Communicator,
        policy: StagePolicy,
        *,
        sums_micro_batches: bool,
        wire_dtype: torch.dtype | None,
    ) -> None:
        self.group, self.comm, self._policy, self._wire_dtype = group, comm, policy, wire_dtype
        alone = comm.world_size == 1
        self._keeps = policy.keeps_gradients or alone
        self._dtype = torch.float32 if sums_micro_batches and self._keeps else group.dtype
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
        return self.reduced

    @property
    def reduces_each_micro_batch(self) -> bool:
        return not self._keeps

    def arm(self) -> None:
        """A backward begins: every parameter of the group may still get a gradient."""
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
        shard = full.numel() // self.comm.world_size
        accumulate = self.reduced is not None
        if not accumulate:
            self.reduced = torch.empty(shard, dtype=torch.float32, device=full.device)
        sent = full if self._wire_dtype is None else full.to(self._wire_dtype)
        self._handle = self.comm.reduce_scatter_flat(sent, self.sums, accumulate=accumulate, what=self.group.label)

    def finish_reduce(self) -> None:
        """Wait for the reduction in flight, if any, and give the full buffer back or mark it empty."""
        if self._handle is None:
            return
        self._handle.wait()
        self._handle = None
        self._filled = [False] * len(self._filled)
        if self._policy.frees_gradients:
            self._full = None
        if not self._policy.shards_state:
            self._spread()

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

    def clear(self) -> None:
        """The step is over, taken or skipped: nothing of it may leak into the next."""
        self.finish_reduce()
        self.drop()

    def drop(self) -> None:
        """Forget everything without waiting for anybody."""
        self._handle = None
        self._filled = [False] * len(self._filled)
        self.reduced = None
        if self._policy.frees_gradients and self.comm.world_size > 1:
            self._full = None

"""The fp32 master weights of one shard, whole or split into the 16-bit weights and what they lack.

Neighbours: `zero/group.py` owns one per flat group; `optimizer.py` updates slices of it; `ops/rounding.py` has the
arithmetic of the split. See "Split master" in README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.ops.rounding import merge_master, round_bf16, split_master


@dataclass
class WeightShard:
    """Flat weights of one shard, exact in fp32.

    Args:
        compute: (n,) what the forward reads: fp32 (then it is the master itself) or bf16.
        low: (n,) int16, the rest of the master under bf16 compute; None under fp32.

    Ownership: `compute` may be a view of the unit's gathered buffer; nothing here is reallocated.
    """

    compute: Tensor
    low: Tensor | None = None

    @classmethod
    def around(cls, compute: Tensor) -> WeightShard:
        """Wrap a shard of weights, with a zeroed low half where the dtype needs one."""
        if compute.dtype == torch.float32:
            return cls(compute)
        return cls(compute, torch.zeros(compute.numel(), dtype=torch.int16, device=compute.device))

    def slice(self, start: int, stop: int) -> WeightShard:
        """The same memory, elements [start, stop)."""
        return WeightShard(self.compute[start:stop], None if self.low is None else self.low[start:stop])

    def master(self) -> Tensor:
        """The fp32 values, (n,): the memory itself under fp32 compute, a new tensor else."""
        return self.compute if self.low is None else merge_master(self.compute, self.low)

    def store(self, values: Tensor) -> None:
        """Set the fp32 values, (n,) on any device."""
        values = values.to(self.compute.device)
        if self.low is None and self.compute.dtype == torch.bfloat16:
            round_bf16(values.contiguous(), self.compute)
            return
        if self.low is None:
            self.compute.copy_(values)
            return
        high, low = split_master(values.contiguous())
        self.compute.copy_(high)
        self.low.copy_(low)

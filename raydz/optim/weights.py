"""The fp32 master weights of one shard: the weights themselves, split into two halves, or a copy beside them.

Neighbours: `zero/group.py` owns one per flat group; `optimizer.py` updates slices of it; `ops/rounding.py` has the
arithmetic of the split. See "Split master" in README.md.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.ops.operands import Operands
from raydz.ops.rounding import merge_master, round_bf16, split_master


@dataclass
class WeightShard:
    """Flat weights of one shard, exact in fp32 where they are trained (or in bf16, where that is asked for).

    Args:
        compute: (n,) what the forward reads: fp32 (then it is the master), bf16, fp16, or of any dtype if frozen.
        low: (n,) int16, the rest of the master under bf16 compute.
        separate: (n,) fp32, the master under fp16 compute, whose range is too narrow for a split.
        home: (n,) the same weights in host memory, where they are updated; `low` and `separate` are beside it then.

    Ownership: `compute` may be a view of the unit's gathered buffer, or lie in host memory while the rest is on a
    device; nothing here is reallocated.
    """

    compute: Tensor
    low: Tensor | None = None
    separate: Tensor | None = None
    home: Tensor | None = None

    @classmethod
    def around(cls, compute: Tensor, *, keeps_rest: bool = True, device: torch.device | None = None) -> WeightShard:
        """Wrap a shard of weights, with a zeroed rest or master where the dtype needs one.

        Args:
            keeps_rest: without it bf16 weights are their own masters, see "bf16 states" in README.md.
            device: of the rest or master; None: where the weights are.
        """
        device = device or compute.device
        if compute.dtype == torch.float32 or (compute.dtype == torch.bfloat16 and not keeps_rest):
            return cls(compute)
        if compute.dtype == torch.float16:
            return cls(compute, separate=torch.zeros(compute.numel(), dtype=torch.float32, device=device))
        return cls(compute, torch.zeros(compute.numel(), dtype=torch.int16, device=device))

    def slice(self, start: int, stop: int) -> WeightShard:
        """The same memory, elements [start, stop)."""
        low = None if self.low is None else self.low[start:stop]
        separate = None if self.separate is None else self.separate[start:stop]
        home = None if self.home is None else self.home[start:stop]
        return WeightShard(self.compute[start:stop], low, separate, home)

    @property
    def updated(self) -> Tensor:
        """What an update changes: `home`, or `compute` itself."""
        return self.compute if self.home is None else self.home

    def operands(self, grad: Tensor, *states: Tensor) -> Operands:
        """What a one-pass step reads and writes."""
        if self.separate is not None:
            return Operands(self.separate, grad, states, out=self.updated)
        return Operands(self.updated, grad, states, self.low)

    def master(self) -> Tensor:
        """The exact values, (n,): a new tensor under a split master, live memory else.

        Dtype: fp32 where trained, or bf16 where that is the master.
        """
        if self.separate is not None:
            return self.separate
        return self.updated if self.low is None else merge_master(self.updated.to(self.low.device), self.low)

    def store(self, values: Tensor) -> None:
        """Set the exact values, (n,) on any device; fp32, or already of the compute dtype."""
        high = self.updated
        values = values.to(high.device)
        if self.separate is not None:
            self.separate.copy_(values)
            high.copy_(self.separate)
        elif self.low is not None:
            upper, low = split_master(values.float().contiguous())
            high.copy_(upper)
            self.low.copy_(low)
        elif high.dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
            round_bf16(values.float().contiguous(), high)
        else:
            high.copy_(values)
        if self.home is not None:
            self.compute.copy_(self.home)

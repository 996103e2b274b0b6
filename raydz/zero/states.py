"""Optimizer states of one flat group, as long as what the rank owns, or shorter where families of parameters differ.

Neighbours: `update.py` makes one a group; `checkpoint/pieces.py` saves what `of` gives. See "Settings" in README.md.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence

import torch
from torch import Tensor


class GroupStates:
    """Flat tensors by name, zero from the start.

    Where all elements have the same states, each tensor lies beside the owned weights element by element. Else the
    stretches of each family stand packed one after the other, so that none pays for states it does not have.

    Args:
        stretches: (start, stop, names of states) in ascending order; elements outside belong to no parameter.
        owned_numel: elements of the shard.
        dtype: fp32, or bf16 where states are rounded by chance.

    Attributes:
        tensors: name to tensor.
    """

    def __init__(
        self, stretches: Sequence[tuple[int, int, tuple[str, ...]]], owned_numel: int, device: torch.device,
        dtype: torch.dtype = torch.float32,
    ) -> None:  # fmt: skip
        self._stretches = list(stretches)
        self._starts = [start for start, _, _ in stretches]
        families = dict.fromkeys(names for _, _, names in stretches)
        self._offsets: list[int] = []
        lengths = dict.fromkeys(families, owned_numel if len(families) == 1 else 0)
        for start, stop, names in stretches:
            self._offsets.append(start if len(families) == 1 else lengths[names])
            if len(families) > 1:
                lengths[names] += stop - start
        self.tensors: dict[str, Tensor] = {
            name: torch.zeros(length, dtype=dtype, device=device) for names, length in lengths.items() for name in names
        }

    @classmethod
    def over(cls, tensors: dict[str, Tensor]) -> GroupStates:
        """States that exist, all of one length."""
        states = cls([(0, 0, tuple(tensors))], 0, torch.device("cpu"))
        numel = max((tensor.numel() for tensor in tensors.values()), default=sys.maxsize)
        states._stretches, states.tensors = [(0, numel, tuple(tensors))], tensors
        return states

    def of(self, start: int, stop: int) -> dict[str, Tensor]:
        """The states of owned elements [start, stop), which lie in one stretch; views."""
        index = bisect_right(self._starts, start) - 1
        first, last, names = self._stretches[index]
        assert first <= start and stop <= last
        offset = self._offsets[index] + start - first
        return {name: self.tensors[name][offset : offset + stop - start] for name in names}

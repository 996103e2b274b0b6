"""The rows of each step as tensors, and how many valid tokens the whole step has.

Neighbours: `loop.py` asks for a step's micro-batches; `data/` has order and packing. Every rank can count the tokens
of the global batch by itself, because the order is a pure function of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from raydz.data import IGNORE, BatchOrder, PackedRows, split

MicroBatch = dict[str, Any]
"""Tensors by name; `document_ids` is None where every row is one document, for which attention has faster kernels."""


@dataclass(frozen=True)
class StepBatch:
    """What one rank does in one step.

    Args:
        micro_batches: input_ids, labels, position_ids, document_ids, each (B, T) int64 on `device`.
        num_tokens: valid labels of the whole step, over all ranks and micro-batches.
        num_own_tokens: those of this rank.
    """

    micro_batches: list[MicroBatch]
    num_tokens: int
    num_own_tokens: int


class Feed:
    """Batches of the training set.

    Args:
        rank, world_size: among the ranks that work on different rows.
    """

    def __init__(
        self, rows: PackedRows, order: BatchOrder, *, rank: int, world_size: int, micro_batch: int, device: torch.device
    ) -> None:
        self.rows, self.order = rows, order
        self._rank, self._world_size, self._micro_batch, self._device = rank, world_size, micro_batch, device

    def batch(self, step: int) -> StepBatch:
        """The batch of training step `step`, counted from 1."""
        indices = self.order.indices(step - 1)
        own = split(indices, self._rank, self._world_size, self._micro_batch)
        return StepBatch(
            [to_tensors(self.rows, part, self._device) for part in own],
            int(self.rows.num_valid_tokens(indices).sum()),
            int(self.rows.num_valid_tokens(np.concatenate(own)).sum()),
        )


def to_tensors(rows: PackedRows, indices: np.ndarray, device: torch.device) -> MicroBatch:
    """Rows as int64 tensors; no rows become one row whose labels are all ignored, so that collectives still happen."""
    batch = rows.rows(indices if len(indices) else np.zeros(1, dtype=np.int64))
    documents = batch["document_ids"]
    is_whole = bool((documents == documents[:, :1]).all())  # a function of the rows alone: a resumed run chooses alike
    tensors = {name: torch.from_numpy(np.ascontiguousarray(array)).long() for name, array in batch.items()}
    if not len(indices):
        tensors["labels"].fill_(IGNORE)
    moved: MicroBatch = {name: tensor.to(device, non_blocking=True) for name, tensor in tensors.items()}
    return moved | {"document_ids": None} if is_whole else moved

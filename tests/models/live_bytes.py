"""Bytes of the tensors that operations made: those alive now and the most that were, by watching their storages."""

from __future__ import annotations

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is active; what existed before does not count. Memory inside an operation is not seen."""

    def __init__(self, *existing: torch.Tensor) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in existing}
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known:
                    self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.now())
        return out

    def now(self) -> int:
        """Bytes alive."""
        self._made = {key: entry for key, entry in self._made.items() if not entry[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())

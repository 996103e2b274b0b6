"""Device memory lent to somebody else: storages whose bytes wait in host memory while their tensors stay what they are.

Layer 3. `zero/moves.py` says which tensors. README.md, "State moves".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.offload.memory import HostMemory


@dataclass
class _Away:
    storage: torch.UntypedStorage
    host: Tensor


class StorageMoves:
    """Moves storages to the host and back, bit by bit.

    A tensor on a storage that is away has no memory; whoever reads it may end the process. Views stay views: when the
    storage is back, at whatever address, so are all of them.

    Args:
        memory: what host buffers are taken from. Pinned ones are kept for the next move: making them takes long.
        device: whose memory is given back; what lies elsewhere stays.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._away: dict[int, _Away] = {}
        self._kept: dict[int, list[Tensor]] = {}

    @property
    def bytes_away(self) -> int:
        return sum(moved.host.numel() for moved in self._away.values())

    def send(self, tensors: Iterable[Tensor], *, pinned: bool, blocking: bool) -> None:
        """Move the storages of `tensors` to the host, each once. What is away, empty or somebody else's memory stays.

        Args:
            blocking: return when the bytes are there; else when the copies are launched.

        Raises:
            OffloadError: the host's budget is spent; then nothing of this call has moved.
        """
        sent: list[int] = []
        try:
            for tensor in tensors:
                storage = tensor.untyped_storage()
                if tensor.device == self._device and storage.nbytes() and storage.resizable():
                    self._away[storage._cdata] = self._copy_out(storage, pinned)
                    sent.append(storage._cdata)
        except BaseException:
            self._bring([self._away.pop(key) for key in sent])
            raise
        if blocking:
            self._synchronise()

    def _copy_out(self, storage: torch.UntypedStorage, pinned: bool) -> _Away:
        kept = self._kept.get(storage.nbytes(), [])
        host = kept.pop() if kept else self._take(storage.nbytes(), pinned)
        host.copy_(_bytes_of(storage, self._device), non_blocking=True)
        storage.resize_(0)  # the allocator gives it out again in the order of this stream, so after the copy
        return _Away(storage, host)

    def _take(self, num_bytes: int, pinned: bool) -> Tensor:
        return self._memory.empty(num_bytes, torch.uint8, "states moved away", pinned=pinned)

    def bring_back(self, *, blocking: bool = True) -> None:
        """Move everything back. The current stream reads what it launches after this; others wait for it."""
        moved, self._away = list(self._away.values()), {}
        self._bring(moved)
        if blocking:
            self._synchronise()

    def _bring(self, moved: list[_Away]) -> None:
        for item in moved:
            item.storage.resize_(item.host.numel())
            _bytes_of(item.storage, self._device).copy_(item.host, non_blocking=True)
        for item in moved:
            if self._device.type == "cuda":
                self._kept.setdefault(item.host.numel(), []).append(item.host)
            else:
                self._memory.free(item.host)

    def _synchronise(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def close(self) -> None:
        """Give the buffers that are kept back. What is away stays away."""
        self._synchronise()
        for buffers in self._kept.values():
            for buffer in buffers:
                self._memory.free(buffer)
        self._kept.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)

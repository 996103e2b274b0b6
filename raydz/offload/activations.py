"""Inputs of recomputed blocks in host memory: they leave during forward and are back in time for backward.

Layer 3. `models/checkpointing.py` runs a block within `ActivationOffload.leaving`; nothing here knows blocks.
README.md, "Activations".
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from raydz.dist.waits import StreamWaits
from raydz.offload.memory import HostMemory


class ActivationOffload:
    """Host buffers for saved tensors, and the stream on which they go and come.

    Buffers are used again for what is saved later, in this step or another. One that is idle and too small for what
    comes is given back before another is made, so there are never more of them than were in use at a time.

    Args:
        memory: what buffers are taken from.
        device: that computes.

    Attributes:
        num_buffers: that exist now, in use or idle.
        bytes_saved: copied to the host since the start.
        waits: of computation for what comes back, and for what leaves.
    """

    def __init__(self, memory: HostMemory, device: torch.device) -> None:
        self._memory, self._device = memory, device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._idle: list[Tensor] = []
        self._last: weakref.ref[_Saved] | None = None
        self.num_buffers = 0
        self.bytes_saved = 0
        self.waits = StreamWaits(device)

    @contextmanager
    def leaving(self, tensors: Iterable[Tensor]) -> Iterator[None]:
        """Let what autograd saves of `tensors` within the block live in host memory until backward asks for it.

        Only whole, contiguous tensors of the device that take part in backward; what else is saved stays as it is.

        Raises:
            OffloadError: from the operation that saves: the host's budget is spent.
        """
        wanted = {t.data_ptr() for t in tensors if t.requires_grad and t.device == self._device and t.is_contiguous()}
        with saved_tensors_hooks(lambda t: self._save(t) if self._is_wanted(t, wanted) else t, _load):
            yield

    def _is_wanted(self, tensor: Tensor, wanted: set[int]) -> bool:
        return tensor.data_ptr() in wanted and tensor.is_contiguous() and tensor.numel() > 0

    def _save(self, tensor: Tensor) -> _Saved:
        saved = _Saved(self, tensor, self._take(tensor.numel() * tensor.element_size()), self._last)
        self.bytes_saved += saved.num_bytes
        with self._moving() as events:
            saved.host.copy_(tensor.reshape(-1), non_blocking=True)
        saved.event = events[0] if events else None
        self._let_go()
        self._last = weakref.ref(saved)
        return saved

    def _let_go(self) -> None:
        """Give the tensor that left last back to the device's allocator, in the compute stream's order."""
        saved = None if self._last is None else self._last()
        if saved is not None:
            saved.wait()
            saved.source = None

    def fetch(self, saved: _Saved) -> None:
        """Begin to bring a saved tensor back, unless it is there or on its way."""
        if saved.source is not None:
            return
        saved.source = torch.empty(saved.shape, dtype=saved.host.dtype, device=self._device)
        with self._moving() as events:
            saved.source.view(-1).copy_(saved.host, non_blocking=True)
        saved.event = events[0] if events else None

    @contextmanager
    def _moving(self) -> Iterator[list[torch.cuda.Event]]:
        """Copy on the side stream, after what was launched before; afterwards the list holds the end, on a GPU."""
        events: list[torch.cuda.Event] = []
        if self._stream is None:
            with self.waits.measuring():
                yield events
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield events
            events.append(self._stream.record_event())

    def _take(self, num_bytes: int) -> Tensor:
        """A buffer of at least so many bytes, the smallest that is idle."""
        fitting = [(buffer.numel(), index) for index, buffer in enumerate(self._idle) if buffer.numel() >= num_bytes]
        if fitting:
            return self._idle.pop(min(fitting)[1])  # a graph that is collected meanwhile only adds to the end
        if self._idle:
            self._give_back(self._idle.pop())
        buffer = self._memory.empty(num_bytes, torch.uint8, "inputs of blocks that are recomputed")
        self.num_buffers += 1
        return buffer

    def _give_back(self, buffer: Tensor) -> None:
        if self._stream is not None:
            self._stream.synchronize()
        self._memory.free(buffer)
        self.num_buffers -= 1

    def put_back(self, buffer: Tensor) -> None:
        """Nobody needs what a buffer holds; copies on the side stream come after those that still read it."""
        self._idle.append(buffer)

    def close(self) -> None:
        """Give idle buffers back."""
        while self._idle:
            self._give_back(self._idle.pop())


class _Saved:
    """A tensor that autograd saved. Its buffer is idle again when the graph that holds this is gone.

    Attributes:
        source: the tensor on the device: before it has left, and while it is on its way back.
        event: the end of the last copy, on a GPU.
    """

    def __init__(
        self, owner: ActivationOffload, tensor: Tensor, buffer: Tensor, before: weakref.ref[_Saved] | None
    ) -> None:
        self._owner, self._buffer, self._before = owner, buffer, before
        self.shape, self.num_bytes = tensor.shape, tensor.numel() * tensor.element_size()
        self.host = buffer[: self.num_bytes].view(tensor.dtype)
        self.source: Tensor | None = tensor
        self.event: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream go on only when the last copy has ended."""
        if self.event is not None:
            with self._owner.waits.measuring():
                torch.cuda.current_stream().wait_event(self.event)
            self.event = None

    def load(self) -> Tensor:
        """The tensor, for whoever recomputes; the one that was saved before it sets out."""
        self._owner.fetch(self)
        self.wait()
        tensor, self.source = self.source, None
        before = self._before() if self._before is not None else None
        if before is not None:
            self._owner.fetch(before)
        assert tensor is not None  # fetched above
        return tensor

    def __del__(self) -> None:
        if self.source is not None:
            self.wait()  # the memory goes back to the allocator: not before the copy has ended
        self._owner.put_back(self._buffer)


def _load(saved: Any) -> Tensor:
    return saved.load() if isinstance(saved, _Saved) else saved

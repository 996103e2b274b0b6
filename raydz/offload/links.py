"""Copies between device and host on streams of their own; on a CPU plain copies, by the same calls.

Layer 3. `pipeline.py` sends gradients out and weights back through one `Links`. README.md, "Streams".
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Mark(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Let the current stream go on only from there."""

    def synchronize(self) -> None:
        """Wait until it is reached. Blocking: the host."""

    def query(self) -> bool:
        """Whether it is reached."""


class _Reached:
    """Where copies are made at once."""

    def wait(self) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True


REACHED: Mark = _Reached()


class Links:
    """Both directions of one device's link."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        is_cuda = device.type == "cuda"
        self._out = torch.cuda.Stream(device) if is_cuda else None
        self._in = torch.cuda.Stream(device) if is_cuda else None

    def here(self) -> Mark:
        """What the current stream was given up to now."""
        return REACHED if self._out is None else _record(torch.cuda.current_stream(self._device))

    def to_host(self, source: Tensor, target: Tensor) -> Mark:
        """Copy what the current stream makes of `source`. Ownership: both until the mark is reached."""
        if self._out is None:
            target.copy_(source)
            return REACHED
        self._out.wait_stream(torch.cuda.current_stream(self._device))
        return _copy(source, target, self._out)

    def to_device(self, source: Tensor, target: Tensor, after: Mark) -> Mark:
        """Copy once `after` is reached. Ownership: both until the mark is reached. Blocking: to host memory."""
        if self._in is None or not target.is_cuda:
            after.synchronize()
            target.copy_(source)
            return REACHED
        with torch.cuda.device(self._device), torch.cuda.stream(self._in):
            after.wait()
        return _copy(source, target, self._in)


def _copy(source: Tensor, target: Tensor, stream: torch.cuda.Stream) -> Mark:
    with torch.cuda.stream(stream):
        target.copy_(source, non_blocking=True)
        return _record(stream)


def _record(stream: torch.cuda.Stream) -> Mark:
    return stream.record_event(torch.cuda.Event(blocking=True))  # who waits sleeps: its core updates other units

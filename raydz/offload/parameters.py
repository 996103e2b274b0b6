"""Compute weights that live in host memory: each rank's shard is copied to the device as a unit is about to be used.

Layer 3. `zero/gathering.py` fetches a shard into its place in the gathered buffer, `zero/update.py` borrows it for an
update on the device. README.md, "Parameters".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.config import EngineConfig
from raydz.dist.waits import StreamWaits
from raydz.offload.aio import AioOptions
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import HostMemory
from raydz.offload.shards import DiskShards
from raydz.optim import WeightShard


@dataclass
class Arrival:
    """Marks of what was launched on the fetching stream; None where a copy is done when it returns.

    Args:
        event: the end.
        fetched: of what was copied from host memory.
    """

    event: torch.cuda.Event | None = None
    fetched: torch.cuda.Event | None = None

    def wait(self) -> None:
        """Let the current stream go on only after the end. The host never waits."""
        if self.event is not None:
            torch.cuda.current_stream().wait_event(self.event)


class ParameterOffload:
    """Where the shards of released weights live, and the stream on which they come.

    Args:
        memory: what shards are taken from.
        device: that computes.
        pinned: whether their memory is, see `HostMemory`.
        disk: what shards beyond `max_in_memory` elements are taken from; None: all are in host memory.

    Attributes:
        bytes_fetched: copied to the device since the start.
        waits: of computation for what is fetched.
    """

    def __init__(
        self, memory: HostMemory, device: torch.device, *, pinned: bool = True, disk: DiskShards | None = None,
        max_in_memory: int = 0,
    ) -> None:  # fmt: skip
        self.memory, self.device, self._pinned = memory, device, pinned
        self.disk, self._room = disk, max_in_memory
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.bytes_fetched = 0
        self.waits = StreamWaits(device)
        self._arrival = Arrival()

    @classmethod
    def from_config(
        cls, config: EngineConfig, memory: Callable[[], HostMemory], device: torch.device, rank: int = 0
    ) -> ParameterOffload | None:
        """What `offload_param` asks for; None: weights stay on the device."""
        section, aio = config.zero_optimization.offload_param, config.aio
        if section is None or section.device == "none":
            return None
        disk = None
        if section.device == "nvme":
            disk = DiskShards(
                memory(), SwapFolder(str(section.nvme_path), rank=rank),
                num_slots=section.buffer_count, slot_numel=section.buffer_size, pinned=section.pin_memory,
                aio=AioOptions(aio.block_size, aio.queue_depth, aio.threads, aio.single_submit, aio.overlap_events),
            )  # fmt: skip
        return cls(memory(), device, pinned=section.pin_memory, disk=disk, max_in_memory=section.max_in_cpu)

    def shard(self, numel: int, dtype: torch.dtype, what: str) -> Tensor:
        """Memory for a shard, (numel,), zeros: the host's, or a disk's beyond what shall be in the host's.

        Raises:
            OffloadError: the host's budget is spent, or the disk full.
        """
        if self.disk is not None and numel > self._room:
            return self.disk.shard(numel, dtype, what)
        self._room -= numel
        return self.memory.empty(numel, dtype, f"the weights of {what}", pinned=self._pinned)

    def give_back(self, shard: Tensor) -> None:
        """The weights live elsewhere from now on, or no longer; memory that `shard` did not give is left alone."""
        if self.disk is not None and self.is_on_disk(shard):
            self.disk.drop(shard)
        else:
            self.memory.free(shard)

    def is_on_disk(self, shard: Tensor) -> bool:
        return self.disk is not None and self.disk.has(shard)

    def synchronise(self) -> None:
        """Wait until nothing reads host memory, and everything is on the disk. Blocking: the host."""
        if self._stream is not None:
            self._stream.synchronize()
        if self.disk is not None:
            self.disk.finish()

    def read_ahead(self, shard: Tensor) -> None:
        """It will be fetched soon."""
        if self.disk is not None and self.disk.has(shard):
            self.disk.read_ahead(shard)

    def store(self, shard: Tensor, values: Tensor) -> None:
        """Put new values, in host memory, into a shard that no fetch reads. Any thread."""
        if self.disk is not None and self.disk.has(shard):
            self.disk.store(shard, values)
        else:
            shard.copy_(values)

    def land(self, shard: Tensor) -> None:
        """Let the shard's memory hold what was stored."""
        if self.disk is not None and self.disk.has(shard):
            self.disk.land(shard)

    def forget(self, shard: Tensor) -> None:
        """The shard's memory was written to, or will be: nothing that was read ahead counts."""
        if self.disk is not None and self.disk.has(shard):
            self.disk.forget(shard)

    def await_fetch(self, arrival: Arrival) -> None:
        """Let the current stream wait for what was copied, and count that."""
        if arrival.fetched is not None:
            with self.waits.measuring():
                torch.cuda.current_stream(self.device).wait_event(arrival.fetched)
            arrival.fetched = None

    def close(self) -> None:
        """Remove what is on a disk."""
        if self.disk is not None:
            self.disk.close()

    @contextmanager
    def fetching(self) -> Iterator[Arrival]:
        """Run the body's copies and collectives on the fetching stream, after what was launched before.

        Yields:
            Whose `wait` is for the end of the body.

        Ownership: what the body writes to was allocated outside of it, and is read after `Arrival.wait()`. Host memory
        that it reads must not change until then.
        """
        arrival = self._arrival = Arrival()
        if self._stream is None:
            yield arrival
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield arrival
            arrival.event = self._stream.record_event()

    def fetch(self, own: Tensor, into: Tensor) -> None:
        """Copy a shard to where the device reads it; within `fetching`. Shape: both (n,)."""
        with self.waits.measuring() if self._stream is None else nullcontext():
            if self.disk is not None and self.disk.has(own):
                self.disk.fetch(own, into)
            else:
                into.copy_(own, non_blocking=True)
        if self._stream is not None:
            self._arrival.fetched = self._stream.record_event()
        self.bytes_fetched += own.numel() * own.element_size()


@contextmanager
def on_device(weights: WeightShard, device: torch.device) -> Iterator[WeightShard]:
    """Bring compute weights to `device` within the block and put back what became of them.

    Where they are there, or all of the shard is in one place, it is yielded as it is.

    Memory: a copy of the shard on the device. Blocking: until it is back.
    """
    if weights.compute.device == device:
        yield weights
        return
    moved = WeightShard(weights.compute.to(device, non_blocking=True), weights.low, weights.separate)
    yield moved
    weights.compute.copy_(moved.compute)  # the host waits: a checkpoint may read it next


def fetching(offload: ParameterOffload | None):
    """`offload.fetching()`, or nothing where weights stay on the device."""
    return nullcontext(Arrival()) if offload is None else offload.fetching()

"""`offload_optimizer`, `offload_param` and `aio`: what leaves the device, for where, and how a disk is used.

Layer 1. `engine.ZeroConfig` has the first two, `engine.EngineSections` the last; `offload/options.py` obeys them.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from raydz.config.faults import Fault, Unfit
from raydz.config.section import Count, Positive, Section


class OffloadOptimizerConfig(Section):
    """`zero_optimization.offload_optimizer`."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: Positive = 4
    """Units in host memory at a time of those on the disk; three at least."""
    pin_memory: bool = True
    pipeline_read: bool | None = None
    """None: yes. False: a unit is read from the disk when it is to be updated, not before."""
    pipeline_write: bool | None = None
    """None: yes. False: the update waits until a unit is written to the disk."""
    fast_init: bool = False
    ratio: Annotated[float, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _a_disk_has_a_path(self) -> OffloadOptimizerConfig:
        if self.device == "nvme" and not self.nvme_path:
            raise Unfit(Fault("nvme_path", "there is no path to a disk", got="none", wanted="a folder on a local disk"))
        return self


class OffloadParamConfig(Section):
    """`zero_optimization.offload_param`. Units: sizes count elements."""

    device: Literal["none", "cpu", "nvme"] = "none"
    nvme_path: str | None = None
    buffer_count: Positive = 5
    """Shards in host memory at a time of those on the disk."""
    buffer_size: Positive = 100_000_000
    """Most elements of a shard on the disk."""
    max_in_cpu: Count = 1_000_000_000
    """So many elements of a rank's shards stay in host memory and off the disk."""
    pin_memory: bool = True

    @model_validator(mode="after")
    def _a_disk_has_a_path(self) -> OffloadParamConfig:
        if self.device == "nvme" and not self.nvme_path:
            raise Unfit(Fault("nvme_path", "there is no path to a disk", got="none", wanted="a folder on a local disk"))
        return self


class AioConfig(Section):
    """`aio`: how a tier on a disk reads and writes. Units: bytes."""

    block_size: Positive = 1 << 20
    queue_depth: Positive = 8
    """Blocks in flight, for each thread."""
    thread_count: Positive = 1
    """Threads that submit and collect, each with a ring of its own."""
    intra_op_parallelism: Positive | None = None
    """The same, where both are given the one that counts."""
    single_submit: bool = False
    """Hand every block to the kernel by itself."""
    overlap_events: bool = True
    """False: new blocks are begun when all of the last are done."""

    @model_validator(mode="after")
    def _fits_the_disk(self) -> AioConfig:
        if self.block_size % 4096:
            what, got = "direct reads and writes are whole pages", str(self.block_size)
            raise Unfit(Fault("block_size", what, got=got, wanted="a multiple of 4096"))
        return self

    @property
    def threads(self) -> int:
        return self.intra_op_parallelism or self.thread_count

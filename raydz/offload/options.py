"""What the configuration says about offloading the optimizer, as the update needs it.

Layer 3. `zero/hosted.py` obeys it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from raydz import log
from raydz.config import EngineConfig
from raydz.offload.aio import AioOptions
from raydz.offload.folder import SwapFolder
from raydz.offload.memory import PAGE, HostMemory
from raydz.offload.nvme import NvmeOptions, NvmeTier
from raydz.offload.speculation import Mode
from raydz.offload.tiers import HostTier, Tier, UnitShape
from raydz.ops.native import run_on
from raydz.units import format_bytes

_GRADIENT_ITEM_BYTES = 4


@dataclass(frozen=True)
class Hosting:
    """How optimizer states are kept off the device.

    Args:
        memory: what all host buffers of this engine come from.
        threads: of the kernels that update.
        pinned: page-lock what is copied to and from a device.
        ratio: share of the trained elements whose states leave the device.
        mode: whether updates begin before the norm is known.
        nvme: how units pass between a disk and host memory; None: all of them are in host memory.
        nvme_path: folder on the disk.
    """

    memory: HostMemory
    threads: int
    pinned: bool = True
    ratio: float = 1.0
    mode: Mode = "auto"
    nvme: NvmeOptions | None = None
    nvme_path: str = ""
    rank: int = 0

    @classmethod
    def from_config(
        cls, config: EngineConfig, memory: Callable[[], HostMemory], local_world_size: int, rank: int = 0
    ) -> Hosting | None:
        """None where the optimizer stays on the device, and `memory` is not asked for."""
        section, parallel = config.zero_optimization.offload_optimizer, config.parallel
        if section is None or section.device == "none":
            return None
        cpus = own_share(sorted(os.sched_getaffinity(0)), rank % local_world_size, local_world_size)
        if parallel.offload_affinity:
            cpus = own_share(parallel.offload_affinity, rank % local_world_size, local_world_size)
            run_on(cpus)
        return cls(
            memory=memory(),
            threads=parallel.offload_threads or len(cpus),
            pinned=section.pin_memory,
            ratio=section.ratio,
            mode=parallel.offload_update,
            nvme=_nvme_options(config) if section.device == "nvme" else None,
            nvme_path=section.nvme_path or "",
            rank=rank,
        )

    def tier(self, units: Sequence[UnitShape]) -> Tier:
        """Where units live. Of what the host budget has left beside their gradients, a disk's cache takes half.

        Raises:
            OffloadError: the host budget or the disk is too small.
        """
        if self.nvme is None:
            return HostTier(units, self.memory, pinned=self.pinned)
        gradients = sum(-(-unit.numel * _GRADIENT_ITEM_BYTES // PAGE) * PAGE for unit in units)
        room = max(0, self.memory.budget_bytes - self.memory.bytes_held - gradients)
        options = replace(self.nvme, cache_bytes=room // 2, reserved_bytes=gradients)
        tier = NvmeTier(units, self.memory, SwapFolder(self.nvme_path, rank=self.rank), options)
        held = {place: format_bytes(num_bytes) for place, num_bytes in tier.bytes_held.items()}
        log.get(__name__).info(
            "optimizer states: %s on %s, %s in host memory (%d of %d units stay there)",
            held["disk"], self.nvme_path, held["host"], len(tier.residents), len(units),
        )  # fmt: skip
        return tier


def own_share(cpus: Sequence[int], local_rank: int, local_world_size: int) -> list[int]:
    """Consecutive CPUs of a rank among those of its node; with fewer CPUs than ranks some share one."""
    first, last = (len(cpus) * rank // local_world_size for rank in (local_rank, local_rank + 1))
    return list(cpus[first : max(last, first + 1)])


def _nvme_options(config: EngineConfig) -> NvmeOptions:
    section, aio = config.zero_optimization.offload_optimizer, config.aio
    assert section is not None
    return NvmeOptions(
        slots=section.buffer_count,
        pinned=section.pin_memory,
        reads_ahead=section.pipeline_read is not False,
        writes_behind=section.pipeline_write is not False,
        aio=AioOptions(aio.block_size, aio.queue_depth, aio.threads, aio.single_submit, aio.overlap_events),
    )

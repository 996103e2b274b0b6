"""Collectives on flat tensors under raydz's own names; ordered sums, so that results do not depend on layout.

Neighbours: `zero/group.py` calls these; `ops/reduction.py` does the ordered sum; `clock.py` takes the time.
On gloo a reduction is an all-to-all and an fp32 sum in rank order, and a gather is point to point: both measured
faster than gloo's built-in ones. On NCCL the native collectives are used unless `ordered` asks otherwise.
See "Ordered sums" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from raydz.dist.clock import CommClock
from raydz.errors import LayoutError
from raydz.ops.reduction import sum_rows

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective in flight; `wait` may be called again and then returns at once."""

    def __init__(self, works: Sequence, clock: CommClock, finish: Callable[[], object] | None = None) -> None:
        self._works, self._clock, self._finish = list(works), clock, finish
        self._done = False
        if self._works:
            clock.launched()

    def wait(self) -> None:
        """Let the compute stream go on only when the result is there.

        Blocking: the host on gloo; the current stream alone on NCCL.
        """
        if self._done:
            return
        if self._works:
            with self._clock.waiting():
                for work in self._works:
                    work.wait()
            self._clock.completed()
            self._works.clear()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._done = True


class Communicator:
    """The collectives of one process group.

    Gathers and reductions of an engine use two communicators over two process groups, so that a gather that is
    wanted soon never queues behind a large reduction.

    Args:
        group: process group, or None for a world of one without torch.distributed.
        ordered: sum in rank order in fp32 by all-to-all (always so on gloo).
        clock: where waits are counted.
    """

    def __init__(self, group: dist.ProcessGroup | None, *, ordered: bool, clock: CommClock) -> None:
        self.group, self.clock = group, clock
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self.is_gloo = group is not None and dist.get_backend(group) == "gloo"
        self._ordered = ordered or self.is_gloo

    def all_gather_flat(self, full: Tensor, *, tag: int) -> Handle:
        """Fill `full` with the shards of all ranks; this rank's shard is already in its place.

        Shape: full (world_size * n,), contiguous; rank r owns [r * n, (r + 1) * n).
        Collective: every rank of the group; on gloo `tag` names the buffer, so that ranks that gather in different
            orders wait for each other instead of receiving each other's bytes.
        Ownership: `full` may be read only after `Handle.wait()`; the own shard must not change before it.
        """
        n = self._shard_numel(full)
        self._count(full)
        if self.world_size == 1 or n == 0:
            return Handle([], self.clock)
        mine = full[self.rank * n : (self.rank + 1) * n]
        with self.clock.waiting():
            if not self.is_gloo:
                works = [_all_gather(full, mine, group=self.group, async_op=True)]
            else:
                works = self._exchange(full, mine, n, tag)
        return Handle(works, self.clock)

    def _exchange(self, full: Tensor, mine: Tensor, n: int, tag: int) -> list:
        works = []
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            works.append(dist.isend(mine, group=self.group, group_dst=to, tag=tag))
            part = full[source * n : (source + 1) * n]
            works.append(dist.irecv(part, group=self.group, group_src=source, tag=tag))
        return works

    def reduce_scatter_flat(self, flat: Tensor, out: Tensor, *, accumulate: bool = False) -> Handle:
        """Sum `flat` over the group and leave this rank's shard in `out` (added to it with `accumulate`).

        Shape: flat (world_size * n,), out (n,); both contiguous, same device.
        Dtype: flat fp32, bf16 or fp16 (that is what travels); out fp32.
        Collective: every rank of the group, in the same order of buckets.
        Ownership: `flat` may be reused only after `Handle.wait()`.

        Raises:
            LayoutError: sizes don't divide, or dtypes do not fit.
        """
        n = self._shard_numel(flat)
        if out.numel() != n or out.dtype != torch.float32:
            raise LayoutError("reduction output does not fit", got=f"{out.numel()} x {out.dtype}", wanted=f"{n} x fp32")
        self._count(flat)
        if self.world_size == 1 or n == 0:
            return Handle([], self.clock, lambda: sum_rows(flat.view(1, n), out, accumulate=accumulate))
        if not self._ordered:
            return self._native_reduce(flat, out, n, accumulate)
        received = torch.empty_like(flat)
        with self.clock.waiting():
            work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)
        rows = received.view(self.world_size, n)
        return Handle([work], self.clock, lambda: sum_rows(rows, out, accumulate=accumulate))

    def _native_reduce(self, flat: Tensor, out: Tensor, n: int, accumulate: bool) -> Handle:
        summed = torch.empty(n, dtype=flat.dtype, device=flat.device)
        with self.clock.waiting():
            work = _reduce_scatter(summed, flat, group=self.group, async_op=True)
        return Handle([work], self.clock, lambda: sum_rows(summed.view(1, n), out, accumulate=accumulate))

    def all_gather_values(self, values: Sequence[float]) -> list[list[float]]:
        """Gather a few fp64 numbers of each rank; row r holds rank r's.

        Collective: every rank of the group, with equally many values. Blocking: the host.
        """
        if self.world_size == 1:
            return [list(values)]
        device = torch.device("cpu") if self.is_gloo else torch.device("cuda", torch.cuda.current_device())
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        everyone = torch.empty(self.world_size * len(values), dtype=torch.float64, device=device)
        with self.clock.waiting():
            _all_gather(everyone, mine, group=self.group)
            rows = everyone.view(self.world_size, len(values)).tolist()
        return rows

    def all_gather_bytes(self, data: bytes, *, limit: int = 1 << 30) -> list[bytes]:
        """Gather one byte string of each rank, in rank order.

        Collective: every rank of the group. Blocking: the host. Memory: world_size times the longest string.

        Raises:
            LayoutError: a rank's string is longer than `limit` bytes (on every rank).
        """
        sizes = [int(row[0]) for row in self.all_gather_values([float(len(data))])]
        if max(sizes) > limit:
            raise LayoutError("a rank sends too much for one gather", got=f"{max(sizes)} bytes", wanted=f"<= {limit}")
        if self.world_size == 1:
            return [data]
        device = torch.device("cpu") if self.is_gloo else torch.device("cuda", torch.cuda.current_device())
        mine = torch.zeros(max(max(sizes), 1), dtype=torch.uint8, device=device)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        everyone = torch.empty(self.world_size * mine.numel(), dtype=torch.uint8, device=device)
        with self.clock.waiting():
            _all_gather(everyone, mine, group=self.group)
        rows = everyone.view(self.world_size, -1).cpu().numpy()
        return [rows[r, : sizes[r]].tobytes() for r in range(self.world_size)]

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Copy `tensor` of group rank `source` into every rank's. Collective and blocking."""
        if self.world_size == 1 or not tensor.numel():
            return
        moved = tensor if self.is_gloo or tensor.is_cuda else tensor.cuda()  # NCCL sends device memory only
        dist.broadcast(moved, group=self.group, group_src=source)
        if moved is not tensor:
            tensor.copy_(moved)

    def barrier(self) -> None:
        """Return when every rank of the group has called this. Blocking: the host."""
        self.all_gather_values([0.0])

    def _shard_numel(self, flat: Tensor) -> int:
        if flat.numel() % self.world_size or not flat.is_contiguous():
            raise LayoutError(
                "a flat tensor does not divide over its group",
                got=f"{flat.numel()} elements, contiguous={flat.is_contiguous()}",
                wanted=f"a contiguous multiple of {self.world_size}",
            )
        return flat.numel() // self.world_size

    def _count(self, flat: Tensor) -> None:
        self.clock.elements_sent += flat.numel() * (self.world_size - 1) // self.world_size

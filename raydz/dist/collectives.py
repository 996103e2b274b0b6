"""Collectives on flat tensors under raydz's own names; ordered sums, so that results do not depend on layout.

Neighbours: `zero/group.py` calls these; `ops/reduction.py` does the ordered sum; `clock.py` takes the time.
On gloo a reduction is an all-to-all and an fp32 sum in rank order, and a gather is point to point: both measured
faster than gloo's built-in ones. On NCCL the native collectives are used unless `ordered` asks otherwise.
See "Ordered sums" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from raydz.dist.clock import CommClock
from raydz.dist.monitor import Waiting
from raydz.dist.sequence import SequenceLog
from raydz.errors import LayoutError, TrainingError
from raydz.ops.quantise import pack_int8, packed_bytes, sum_packed
from raydz.ops.reduction import sum_rows

# torch 2.13 renamed both; 2.11 has the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Handle:
    """A collective in flight; `wait` may be called again and then returns at once."""

    def __init__(
        self, works: Sequence, clock: CommClock, finish: Callable[[], object] | None = None, *,
        what: str = "", waiting: Waiting | None = None,
    ) -> None:  # fmt: skip
        self._works, self._clock, self._finish = list(works), clock, finish
        self._what, self._waiting = what, waiting or Waiting()
        self._done = False
        if self._works:
            clock.launched()

    def wait(self) -> None:
        """Let the compute stream go on only when the result is there.

        Blocking: the host on gloo; the current stream alone on NCCL.

        Raises:
            PeerLost: another rank has gone, or the time limit has passed.
        """
        if self._done:
            return
        if self._works:
            with blocking(self._what, self._clock, self._waiting):
                for work in self._works:
                    work.wait()
            self._clock.completed()
            self._works.clear()
        if self._finish is not None:
            self._finish()
            self._finish = None
        self._done = True


class PeerLost(TrainingError):
    """A collective failed because another rank ended, or did not come within the time limit."""

    retryable = True


@contextmanager
def blocking(what: str, clock: CommClock, waiting: Waiting) -> Iterator[None]:
    """Count the body as waiting, let the monitor see it, and name what it was for if it fails.

    Raises:
        PeerLost: in place of the backend's error.
    """
    waiting.begin(what)
    try:
        with clock.waiting():
            yield
    except RuntimeError as error:
        raise PeerLost(
            "a collective failed: another rank has gone or did not come", where=what,
            got=str(error).strip().splitlines()[0], remedy="the first rank that failed says why",
        ) from error  # fmt: skip
    finally:
        waiting.end()


class Communicator:
    """The collectives of one process group.

    Gathers and reductions of an engine use two communicators over two process groups, so that a gather that is
    wanted soon never queues behind a large reduction.

    Args:
        group: process group, or None for a world of one without torch.distributed.
        ordered: sum in rank order in fp32 by all-to-all (always so on gloo).
        clock: where waits are counted.
        name: of its sequence log.
        waiting: where the monitor looks.

    Attributes:
        bytes_sent: by this rank since the start, with flat tensors and exchanges.
    """

    def __init__(
        self, group: dist.ProcessGroup | None, *, ordered: bool, clock: CommClock, name: str = "collectives",
        waiting: Waiting | None = None,
    ) -> None:  # fmt: skip
        self.group, self.clock = group, clock
        self.log, self._waiting = SequenceLog(name), waiting or Waiting()
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)
        self._backend = "none" if group is None else str(dist.get_backend(group))
        self.is_gloo = self._backend == "gloo"
        self._ordered = ordered or self.is_gloo
        self.bytes_sent = 0

    def all_gather_flat(
        self, full: Tensor, *, tag: int, what: str = "", finish: Callable[[], object] | None = None
    ) -> Handle:
        """Fill `full` with the shards of all ranks; this rank's shard is already in its place.

        Shape: full (world_size * n,), contiguous; rank r owns [r * n, (r + 1) * n).
        Collective: every rank of the group; on gloo `tag` names the buffer, so that ranks that gather in different
            orders wait for each other instead of receiving each other's bytes. `what` names it to people; `finish` is
            called once, at the end of the first `Handle.wait()`.
        Ownership: `full` may be read only after `Handle.wait()`; the own shard must not change before it.
        """
        n = self._shard_numel(full)
        self._count(full)
        if self.world_size == 1 or n == 0:
            return Handle([], self.clock, finish)
        mine = full[self.rank * n : (self.rank + 1) * n]
        with self._launching(f"gather {what or tag}") as what:
            if not self.is_gloo:
                works = [_all_gather(full, mine, group=self.group, async_op=True)]
            else:
                works = self._exchange(full, mine, n, tag)
        return Handle(works, self.clock, finish, what=what, waiting=self._waiting)

    def _exchange(self, full: Tensor, mine: Tensor, n: int, tag: int) -> list:
        works = []
        for distance in range(1, self.world_size):
            to, source = (self.rank + distance) % self.world_size, (self.rank - distance) % self.world_size
            works.append(dist.isend(mine, group=self.group, group_dst=to, tag=tag))
            part = full[source * n : (source + 1) * n]
            works.append(dist.irecv(part, group=self.group, group_src=source, tag=tag))
        return works

    def reduce_scatter_flat(self, flat: Tensor, out: Tensor, *, accumulate: bool = False, what: str = "") -> Handle:
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
            return self._native_reduce(flat, out, n, accumulate, what)
        received = torch.empty_like(flat)
        with self._launching(f"reduce {what}") as what:
            work = dist.all_to_all_single(received, flat, group=self.group, async_op=True)
        rows = received.view(self.world_size, n)
        add = partial(sum_rows, rows, out, accumulate=accumulate)
        return Handle([work], self.clock, add, what=what, waiting=self._waiting)

    def _native_reduce(self, flat: Tensor, out: Tensor, n: int, accumulate: bool, what: str) -> Handle:
        summed = torch.empty(n, dtype=flat.dtype, device=flat.device)
        with self._launching(f"reduce {what}") as what:
            work = _reduce_scatter(summed, flat, group=self.group, async_op=True)
        add = partial(sum_rows, summed.view(1, n), out, accumulate=accumulate)
        return Handle([work], self.clock, add, what=what, waiting=self._waiting)

    def reduce_scatter_int8(self, flat: Tensor, out: Tensor, *, accumulate: bool = False, what: str = "") -> Handle:
        """`reduce_scatter_flat` of int8 blocks: each rank's part is rounded once, then summed in fp32 in rank order.

        Error: of each element, a 254th of its block's largest magnitude on every rank, added up. What is not finite
        arrives as NaN. Ownership: `flat` may be reused at once. See "Int8 blocks" in `ops/README.md`.
        """
        n = self._shard_numel(flat)
        if self.world_size == 1 or n == 0:
            return self.reduce_scatter_flat(flat, out, accumulate=accumulate, what=what)
        sent = torch.empty(self.world_size, packed_bytes(n), dtype=torch.uint8, device=flat.device)
        pack_int8(flat.view(self.world_size, n), sent)
        received = torch.empty_like(sent)
        self._count(sent)
        with self._launching(f"reduce {what}") as what:
            work = dist.all_to_all_single(received, sent, group=self.group, async_op=True)
        add = partial(sum_packed, received, out, accumulate=accumulate)
        return Handle([work], self.clock, add, what=what, waiting=self._waiting)

    def all_reduce_to_shard(self, flat: Tensor, out: Tensor, *, accumulate: bool = False, what: str = "") -> Handle:
        """`reduce_scatter_flat`, but every rank receives the whole sum before it keeps its shard.

        Twice the bytes of a reduce-scatter, in one native collective where sums need no order. Where they do `out` has
        the same bits: the owner's fp32 sum. Ownership: `flat` is overwritten.
        """
        if self.world_size == 1 or not flat.numel():
            return self.reduce_scatter_flat(flat, out, accumulate=accumulate, what=what)
        n = self._shard_numel(flat)
        own = slice(self.rank * n, (self.rank + 1) * n)
        if not self._ordered:
            self._count(flat, 2 * n * (self.world_size - 1))
            with self._launching(f"all-reduce {what}") as what:
                work = dist.all_reduce(flat, group=self.group, async_op=True)
            add = partial(sum_rows, flat[own].view(1, n), out, accumulate=accumulate)
            return Handle([work], self.clock, add, what=what, waiting=self._waiting)
        reduction = self.reduce_scatter_flat(flat, out, accumulate=accumulate, what=what)

        def spread() -> None:
            reduction.wait()
            flat[own] = out
            self.all_gather_flat(flat, tag=0, what=what).wait()

        return Handle([], self.clock, spread)

    @contextmanager
    def _launching(self, what: str) -> Iterator[str]:
        """Note a launch; gives the name to wait under."""
        self.log.note(what)
        self._waiting.calls += 1
        numbered = f"{what} (#{self.log.count} of {self.log.name})"
        with blocking(numbered, self.clock, self._waiting):
            yield numbered

    def all_reduce_flat(self, flat: Tensor) -> None:
        """Sum `flat` over the group in place, in rank order where the group's reductions are.

        Shape: (n,), contiguous, any n. Dtype: fp32. Collective and blocking: every rank, in the same order.
        """
        if self.world_size == 1:
            return
        if not self._ordered:
            with self._launching("all-reduce"):
                dist.all_reduce(flat, group=self.group)
            self._count(flat, 2 * flat.numel() * (self.world_size - 1) // self.world_size)
            return
        n = -(-flat.numel() // self.world_size)
        padded = torch.nn.functional.pad(flat, (0, n * self.world_size - flat.numel()))
        shard = torch.empty(n, dtype=torch.float32, device=flat.device)
        self.reduce_scatter_flat(padded, shard).wait()
        padded[self.rank * n : (self.rank + 1) * n] = shard
        self.all_gather_flat(padded, tag=0).wait()
        flat.copy_(padded[: flat.numel()])

    def exchange(self, pieces: Sequence[Tensor], numels: Sequence[int], *, what: str = "exchange") -> list[Tensor]:
        """Send `pieces[r]` to rank r; returns what each rank sent here, `numels[r]` elements of rank r.

        Shape: 1-D, of any sizes, 0 too; every rank knows what it is sent (gloo does not notice a mismatch). Dtype:
        one for all. Collective and blocking: every rank, in the same order.
        """
        if self.world_size == 1:
            return list(pieces)
        sent = torch.cat(list(pieces))
        received = sent.new_empty(sum(numels))
        with self._launching(what):
            dist.all_to_all_single(received, sent, list(numels), [p.numel() for p in pieces], group=self.group)
        self._count(sent, sent.numel() - pieces[self.rank].numel())
        return list(received.split(list(numels)))

    def all_gather_values(self, values: Sequence[float], *, what: str = "figures") -> list[list[float]]:
        """Gather a few fp64 numbers of each rank; row r holds rank r's.

        Collective: every rank of the group, with equally many values. Blocking: the host.
        """
        if self.world_size == 1:
            return [list(values)]
        device = self._message_device()
        mine = torch.tensor(values, dtype=torch.float64, device=device)
        everyone = torch.zeros(self.world_size * len(values), dtype=torch.float64, device=device)
        with self._launching(what):
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
        device = self._message_device()
        mine = torch.zeros(max(max(sizes), 1), dtype=torch.uint8, device=device)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
        everyone = torch.empty(self.world_size * mine.numel(), dtype=torch.uint8, device=device)
        with self._launching("messages"):
            _all_gather(everyone, mine, group=self.group)
        rows = everyone.view(self.world_size, -1).cpu().numpy()
        return [rows[r, : sizes[r]].tobytes() for r in range(self.world_size)]

    def broadcast(self, tensor: Tensor, *, source: int = 0) -> None:
        """Copy `tensor` of group rank `source` into every rank's. Collective and blocking."""
        if self.world_size == 1 or not tensor.numel():
            return
        self.log.note("broadcast")
        moved = (
            tensor.cuda() if self._backend == "nccl" and not tensor.is_cuda else tensor
        )  # NCCL sends device memory only
        dist.broadcast(moved, group=self.group, group_src=source)
        if moved is not tensor:
            tensor.copy_(moved)

    def barrier(self) -> None:
        """Return when every rank of the group has called this. Blocking: the host."""
        self.all_gather_values([0.0])

    def _message_device(self) -> torch.device:
        """Where the backend takes its tensors from: NCCL only from devices."""
        return torch.device("cuda", torch.cuda.current_device()) if self._backend == "nccl" else torch.device("cpu")

    def _shard_numel(self, flat: Tensor) -> int:
        if flat.numel() % self.world_size or not flat.is_contiguous():
            raise LayoutError(
                "a flat tensor does not divide over its group",
                got=f"{flat.numel()} elements, contiguous={flat.is_contiguous()}",
                wanted=f"a contiguous multiple of {self.world_size}",
            )
        return flat.numel() // self.world_size

    def _count(self, flat: Tensor, numel: int | None = None) -> None:
        """Count `numel` elements as sent; None: what every other rank has no part of."""
        self._waiting.calls += 1
        numel = flat.numel() * (self.world_size - 1) // self.world_size if numel is None else numel
        self.clock.elements_sent += numel
        self.bytes_sent += numel * flat.element_size()

"""Where each parameter lies in its flat group, and which part of it a rank owns. Pure arithmetic, no tensors.

Neighbours: `group.py` cuts buffers by this table; `checkpoint/` stores the intervals it yields.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ALIGNMENT = 16
"""Elements: 32 bytes in bf16, 64 in fp32; vector loads and grouped matrix products want at least 16 bytes."""


@dataclass(frozen=True)
class Segment:
    """One parameter in a flat group: elements [start, stop)."""

    name: str
    shape: tuple[int, ...]
    start: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel


@dataclass(frozen=True)
class Interval:
    """Elements [start, stop) of the flattened parameter `name`, at [offset, offset + stop - start) of a shard."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int
    offset: int


@dataclass(frozen=True)
class GroupLayout:
    """Parameters in order, each aligned, padded at the end so that `world_size` equal shards are aligned too."""

    segments: tuple[Segment, ...]
    world_size: int
    padded_numel: int

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, tuple[int, ...]]], world_size: int) -> GroupLayout:
        segments, end = [], 0
        for name, shape in shapes:
            segments.append(Segment(name, tuple(shape), end))
            end += -(-math.prod(shape) // ALIGNMENT) * ALIGNMENT
        quantum = ALIGNMENT * world_size
        return cls(tuple(segments), world_size, -(-end // quantum) * quantum)

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.world_size

    def shard_range(self, rank: int) -> tuple[int, int]:
        """Elements [start, stop) of the group that `rank` owns."""
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def gaps(self) -> Iterator[tuple[int, int]]:
        """Elements that belong to no parameter."""
        end = 0
        for segment in self.segments:
            if segment.start > end:
                yield end, segment.start
            end = segment.stop
        if end < self.padded_numel:
            yield end, self.padded_numel

    def intervals(self, start: int, stop: int) -> Iterator[Interval]:
        """The parts of parameters within [start, stop) of the group; offsets count from `start`.

        A parameter of no elements yields nothing.
        """
        for segment in self.segments:
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high:
                yield Interval(
                    segment.name, segment.shape, low - segment.start, high - segment.start, offset=low - start
                )


def split_by_numel(numels: Sequence[int], limit: int) -> list[range]:
    """Cut a sequence into consecutive runs of at most `limit` elements; a larger item gets its own run."""
    runs, first, total = [], 0, 0
    for index, numel in enumerate(numels):
        if index > first and total + numel > limit:
            runs.append(range(first, index))
            first, total = index, 0
        total += numel
    if len(numels) > first:
        runs.append(range(first, len(numels)))
    return runs

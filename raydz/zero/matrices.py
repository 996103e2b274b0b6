"""Muon over shards: every matrix is made orthogonal as a whole by one rank, and travels there and back in parts.

Neighbours: `update.py` calls `MatrixUpdate.step`; `optim/muon.py` has the arithmetic. See "Matrices" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raydz.dist import Communicator
from raydz.offload.parameters import on_device
from raydz.optim import Muon, Part, Update, WeightShard, Widening
from raydz.zero.gradients import GroupGradients
from raydz.zero.layout import Segment
from raydz.zero.settings import ParameterSettings, Settings
from raydz.zero.states import GroupStates

_BATCH_NUMEL = 1 << 26
"""Matrices travel together until they are so many elements, or one for each rank at least."""
_NO_WEIGHTS = WeightShard(torch.empty(0))


@dataclass(frozen=True)
class Matrix:
    """A parameter of `gradients[group]`, or one expert of a stacked one, that its `owner` makes orthogonal.

    Args:
        segment: where in the group; of the parameter's name.
        first: which of the parameter's elements is at the segment's start.
    """

    group: int
    segment: Segment
    settings: ParameterSettings
    first: int = 0
    owner: int = 0

    def part(self, shard: tuple[int, int]) -> tuple[int, int]:
        """Elements [start, stop) of the flattened matrix that lie in the elements `shard` of its group."""
        low, high = max(shard[0], self.segment.start), min(shard[1], self.segment.stop)
        return (low - self.segment.start, high - self.segment.start) if low < high else (0, 0)


def matrices_of(group: int, segment: Segment, settings: ParameterSettings) -> Iterator[Matrix]:
    """The parameter itself, or each of the matrices (experts) that it stacks in its first dimension."""
    shape = segment.shape[-2:]
    numel = shape[0] * shape[1]
    for start in range(segment.start, segment.stop, numel):
        one = Segment(segment.name, shape, start)
        yield Matrix(group, one, settings, first=start - segment.start)


def assign_owners(numels: Sequence[int], world_size: int) -> list[int]:
    """An owner for each: the largest first, always to the rank that has least; the same on every rank."""
    loads, owners = [0] * world_size, [0] * len(numels)
    for index in sorted(range(len(numels)), key=lambda i: (-numels[i], i)):
        owners[index] = min(range(world_size), key=lambda rank: (loads[rank], rank))
        loads[owners[index]] += numels[index]
    return owners


def batches(matrices: Sequence[Matrix], world_size: int, limit: int = _BATCH_NUMEL) -> Iterator[list[Matrix]]:
    """Runs of matrices that travel together, with their owners."""
    taken: list[Matrix] = []
    for index, matrix in enumerate(matrices):
        taken.append(matrix)
        is_enough = sum(m.segment.numel for m in taken) >= limit and len(taken) >= world_size
        if is_enough or index + 1 == len(matrices):
            owners = assign_owners([m.segment.numel for m in taken], world_size)
            yield [replace(matrix, owner=owner) for matrix, owner in zip(taken, owners, strict=True)]
            taken = []


class MatrixUpdate:
    """The step of all matrices.

    Args:
        comm: of the ranks that share the shards.
        widening: where masters or states are bf16.
    """

    def __init__(
        self, gradients: Sequence[GroupGradients], states: Sequence[GroupStates], settings: Settings,
        comm: Communicator, widening: Widening | None = None,
    ) -> None:  # fmt: skip
        self._gradients, self._states, self._comm, self._widening = gradients, states, comm, widening
        matrices = [
            matrix
            for index, grads in enumerate(gradients)
            for segment in grads.group.layout.segments
            if settings[segment.name].is_matrix
            for matrix in matrices_of(index, segment, settings[segment.name])
        ]
        self._batches = list(batches(matrices, comm.world_size))
        self._is_whole = all(g.group.owned == (0, g.group.layout.padded_numel) for g in gradients)

    def step(self, optimizer: Muon, now: Update) -> None:
        """Advance momenta and weights; `now` has the schedule's rate. Collective: every rank, once a step."""
        for batch in self._batches:
            directions = [self._direction(optimizer, matrix, now) for matrix in batch]
            changes = self._orthogonal(optimizer, batch, directions)
            for matrix, change in zip(batch, changes, strict=True):
                start, stop = self._owned(matrix)
                if start < stop:
                    group, its = self._gradients[matrix.group].group, matrix.settings
                    own = replace(now, lr=now.lr * its.lr_scale, weight_decay=its.weight_decay)
                    part = group.weights.slice(*self._offsets(matrix))
                    with on_device(part, group.device) as there, self._lent(there, {}, matrix, now) as (weights, _):
                        optimizer.apply(weights, change, matrix.segment.shape, own)

    def _lent(
        self, weights: WeightShard, state: dict[str, Tensor], matrix: Matrix, now: Update
    ) -> AbstractContextManager[tuple[WeightShard, dict[str, Tensor]]]:
        if self._widening is None:
            return nullcontext((weights, state))
        first = matrix.first + self._owned(matrix)[0]
        return self._widening.lend(weights, state, Part(matrix.segment.name, first, now.step))

    def _owned(self, matrix: Matrix) -> tuple[int, int]:
        return matrix.part(self._gradients[matrix.group].group.owned)

    def _offsets(self, matrix: Matrix) -> tuple[int, int]:
        """The owned part of a matrix, counted from the start of what the group owns."""
        start, stop = self._owned(matrix)
        shift = matrix.segment.start - self._gradients[matrix.group].group.owned[0]
        return start + shift, stop + shift

    def _direction(self, optimizer: Muon, matrix: Matrix, now: Update) -> Tensor:
        """This rank's part of what is to be made orthogonal, (n,); of no elements where it has none."""
        grads = self._gradients[matrix.group]
        start, stop = self._owned(matrix)
        if start == stop:
            return grads.sums.new_empty(0, dtype=optimizer.wire_dtype)
        low, high = self._offsets(matrix)
        kept = self._states[matrix.group].of(low, high)
        with self._lent(_NO_WEIGHTS, kept, matrix, now) as (_, state):
            return optimizer.direction(grads.sums[low:high], state, grad_scale=now.grad_scale)

    def _orthogonal(self, optimizer: Muon, batch: list[Matrix], directions: list[Tensor]) -> list[Tensor]:
        """This rank's parts of the updates.

        A matrix that every rank holds (one rank, or stage 0) is made orthogonal by all of them and does not travel.
        """
        if self._is_whole:
            shaped = [d.view(m.segment.shape) for m, d in zip(batch, directions, strict=True)]
            return [optimizer.orthogonal(whole).reshape(-1) for whole in shaped]
        mine = [m for m in batch if m.owner == self._comm.rank]
        wholes = [optimizer.orthogonal(whole).reshape(-1) for whole in self._bring(batch, mine, directions)]
        return self._return(batch, mine, wholes, directions)

    def _part_of(self, matrix: Matrix, rank: int) -> tuple[int, int]:
        return matrix.part(self._gradients[matrix.group].group.layout.shard_range(rank))

    def _numel(self, matrices: list[Matrix], rank: int) -> int:
        parts = [self._part_of(m, rank) for m in matrices]
        return sum(stop - start for start, stop in parts)

    def _bring(self, batch: list[Matrix], mine: list[Matrix], directions: list[Tensor]) -> list[Tensor]:
        """Send every owner its parts; returns the whole matrices that this rank owns."""
        ranks = range(self._comm.world_size)
        pieces = [
            _joined([d for m, d in zip(batch, directions, strict=True) if m.owner == rank], directions[0])
            for rank in ranks
        ]
        received = self._comm.exchange(pieces, [self._numel(mine, rank) for rank in ranks], what="matrices to owners")
        wholes = [directions[0].new_empty(m.segment.numel) for m in mine]
        for rank in ranks:
            offset = 0
            for matrix, whole in zip(mine, wholes, strict=True):
                start, stop = self._part_of(matrix, rank)
                whole[start:stop] = received[rank][offset : offset + stop - start]
                offset += stop - start
        return [whole.view(m.segment.shape) for m, whole in zip(mine, wholes, strict=True)]

    def _return(
        self, batch: list[Matrix], mine: list[Matrix], wholes: list[Tensor], directions: list[Tensor]
    ) -> list[Tensor]:
        """Send every rank its parts of the owned matrices; returns this rank's parts of all, in the batch's order."""
        ranks = range(self._comm.world_size)
        pieces = []
        for rank in ranks:
            parts = [whole[slice(*self._part_of(m, rank))] for m, whole in zip(mine, wholes, strict=True)]
            pieces.append(_joined(parts, directions[0]))
        owned_by = [[m for m in batch if m.owner == rank] for rank in ranks]
        sizes = [self._numel(owned, self._comm.rank) for owned in owned_by]
        received = self._comm.exchange(pieces, sizes, what="matrices from owners")
        offsets, updates = [0] * len(ranks), []
        for matrix, direction in zip(batch, directions, strict=True):
            start = offsets[matrix.owner]
            offsets[matrix.owner] += direction.numel()
            updates.append(received[matrix.owner][start : offsets[matrix.owner]])
        return updates


def _joined(parts: list[Tensor], like: Tensor) -> Tensor:
    return torch.cat(parts) if parts else like.new_empty(0)

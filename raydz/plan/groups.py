"""Flat groups of units: what is padded to what, which parameters stay gathered, and how sizes scale with the model.

Neighbours: `memory.py` and `traffic.py` count bytes of these. The rules are those of `zero/layout.py`,
`zero/options.py` and `ShardedModel`, repeated here because importing them brings torch; tests compare the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from raydz.config import ZeroConfig
from raydz.plan.shapes import ParameterShape, UnitShape

_ALIGNMENT = 16
_INT8_BLOCK = 256
_LARGEST_HOSTED_BUCKET = 50_000_000
_LARGEST_BUCKET = 500_000_000
_LARGEST_PREFETCH = 50_000_000
_LARGEST_PERSISTENT = 100_000


@dataclass(frozen=True)
class EngineSizes:
    """Element counts that the engine works with."""

    bucket_numel: int
    prefetch_numel: int
    persistence_numel: int
    max_persistent_numel: int
    max_live_numel: int
    reuse_numel: int


@dataclass(frozen=True)
class GroupShape:
    """One buffer of a unit's parameters of one (trainable, persistent, dtype).

    Args:
        unit: index of its unit.
        ranks: how many share it, each an equal shard.
        compute_bytes: of an element; None is the configured precision's.
        matrix_numel: elements of parameters that Muon updates as a whole.
    """

    unit: int
    numel: int
    padded_numel: int
    ranks: int
    trainable: bool
    persistent: bool
    compute_bytes: int | None = None
    matrix_numel: int = 0

    @property
    def shard_numel(self) -> int:
        return self.padded_numel // self.ranks


def engine_sizes(zero: ZeroConfig, units: Sequence[UnitShape]) -> EngineSizes:
    """The configured sizes; what is not given is scaled with the model."""
    numels = [unit.numel for unit in units]
    largest = max([1, *numels[1:]] if len(numels) > 1 else [1, *numels])
    given = [size for size in (zero.reduce_bucket_size, zero.allgather_bucket_size) if size is not None]
    if not given and zero.offload_optimizer is not None and zero.offload_optimizer.device != "none":
        given = [_LARGEST_HOSTED_BUCKET]
    prefetch, persistence = zero.stage3_prefetch_bucket_size, zero.stage3_param_persistence_threshold
    prefetch = 0 if zero.overlap_comm is False else prefetch
    return EngineSizes(
        bucket_numel=min(given) if given else _LARGEST_BUCKET,
        prefetch_numel=min(_LARGEST_PREFETCH, largest) if prefetch is None else prefetch,
        persistence_numel=min(_LARGEST_PERSISTENT, largest // 64) if persistence is None else persistence,
        max_persistent_numel=zero.stage3_model_persistence_threshold,
        max_live_numel=zero.stage3_max_live_parameters,
        reuse_numel=zero.stage3_max_reuse_distance or 0,
    )


def cut_groups(units: Sequence[UnitShape], sizes: EngineSizes, *, stage: int, ranks: int) -> list[GroupShape]:
    """The flat groups of all units, in the engine's order, each shared by `ranks` ranks."""
    groups, left = [], sizes.max_persistent_numel if stage == 3 else -1
    for index, unit in enumerate(units):
        kinds: dict[tuple[bool, bool, int | None], list[ParameterShape]] = {}
        for parameter in unit.parameters:
            persistent = parameter.numel < sizes.persistence_numel and parameter.numel <= left
            left -= parameter.numel if persistent else 0
            kinds.setdefault((not parameter.trainable, persistent, parameter.compute_bytes), []).append(parameter)
        for frozen, persistent, compute_bytes in sorted(kinds, key=lambda kind: kind[:2]):
            for run in _runs(kinds[frozen, persistent, compute_bytes], sizes.bucket_numel):
                numels = [parameter.numel for parameter in run]
                matrices = sum(parameter.numel for parameter in run if parameter.is_matrix)
                padded = padded_numel(numels, ranks)
                groups.append(
                    GroupShape(index, sum(numels), padded, ranks, not frozen, persistent, compute_bytes, matrices)
                )
    return groups


def kept_units(units: Sequence[UnitShape], groups: Sequence[GroupShape], sizes: EngineSizes) -> set[int]:
    """Units beside the root that stay gathered from forward to backward; groups as at stage 3."""
    numels = [sum(group.padded_numel for group in groups if group.unit == index) for index in range(len(units))]
    room = sum(group.padded_numel - group.shard_numel for group in groups if not group.persistent)
    kept, distance = set(), 0
    for index in reversed(range(1, len(units))):
        fits = numels[0] + numels[index] + distance // 2 <= min(room, sizes.max_live_numel)
        if not units[index].is_lookup and (distance == 0 or (distance <= sizes.reuse_numel and fits)):
            kept.add(index)
        distance += numels[index] * (1 if units[index].is_lookup else 2)
    return kept


def padded_numel(numels: Sequence[int], ranks: int) -> int:
    """Elements of a flat group: each parameter aligned, the end a multiple for every rank."""
    end = sum(-(-numel // _ALIGNMENT) * _ALIGNMENT for numel in numels)
    return -(-end // (_ALIGNMENT * ranks)) * _ALIGNMENT * ranks


def packed_bytes(numel: int) -> int:
    """Bytes of so many elements as int8 blocks: codes, then an fp32 scale a block, each aligned."""
    codes, scales = -(-numel // 16) * 16, 4 * -(-numel // _INT8_BLOCK)
    return -(-(codes + scales) // 16) * 16


def _runs(members: Sequence[ParameterShape], limit: int) -> Iterator[list[ParameterShape]]:
    """Consecutive parameters of at most `limit` elements together; a larger one stays alone."""
    run: list[ParameterShape] = []
    total = 0
    for parameter in members:
        if run and total + parameter.numel > limit:
            yield run
            run, total = [], 0
        run.append(parameter)
        total += parameter.numel
    if run:
        yield run

"""The batch triangle: global batch = micro-batch x accumulation x data-parallel ranks.

Layer 1. Called by `EngineConfig.batch` as soon as the world size is known; the rule is DeepSpeed's.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydz.errors import ConfigError

_WHERE = "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps"


@dataclass(frozen=True)
class BatchSize:
    """Rows of one optimizer step and how they are cut.

    `global_batch = micro_batch * accumulation * world_size`, and less where ranks do not divide it (`cut_batch`).
    """

    global_batch: int
    micro_batch: int
    accumulation: int


def resolve_batch(
    train_batch_size: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> BatchSize:
    """Derive what is missing (None) of the three sizes and check that they close.

    With only a global batch or only a micro-batch given, accumulation is 1. `world_size` counts data-parallel ranks.

    Raises:
        ConfigError: neither batch size is given, a size is below 1, or the product does not fit; names the three
            numbers, the ranks, and each single change that would fit.
    """
    _check_positive(train_batch_size, micro, accumulation, world_size)
    if train_batch_size is None and micro is None:
        raise ConfigError(
            "the batch size is not given",
            where=_WHERE,
            got="none of them" if accumulation is None else f"only gradient_accumulation_steps {accumulation}",
            wanted="train_batch_size or train_micro_batch_size_per_gpu",
            remedy="set train_batch_size to the rows of one optimizer step over all ranks",
        )
    if train_batch_size is None:
        assert micro is not None
        accumulation = accumulation or 1
        return BatchSize(micro * accumulation * world_size, micro, accumulation)
    if micro is None:
        accumulation = accumulation or 1
        micro = _divide(train_batch_size, accumulation * world_size, "train_micro_batch_size_per_gpu", world_size)
    elif accumulation is None:
        accumulation = _divide(train_batch_size, micro * world_size, "gradient_accumulation_steps", world_size)
    if micro * accumulation * world_size != train_batch_size:
        raise _open_triangle(train_batch_size, micro, accumulation, world_size)
    return BatchSize(train_batch_size, micro, accumulation)


def cut_batch(train_batch_size: int, micro: int | None, world_size: int, *, most_ranks: int) -> BatchSize:
    """The cut of a global batch that stays the same on any number of ranks: no rank has two rows more than another.

    A micro-batch that is not given is what `most_ranks` take at once; fewer ranks accumulate.
    """
    _check_positive(train_batch_size, micro, None, world_size)
    micro = micro or -(-train_batch_size // most_ranks)
    rows = -(-train_batch_size // world_size)
    return BatchSize(train_batch_size, micro, -(-rows // micro))


def _check_positive(train_batch_size: int | None, micro: int | None, accumulation: int | None, world_size: int) -> None:
    sizes = dict(zip(_WHERE.split(", "), (train_batch_size, micro, accumulation), strict=True))
    for name, size in {**sizes, "world_size": world_size}.items():
        if size is not None and size < 1:
            raise ConfigError("a batch size must be at least 1", where=name, got=size, wanted="1 or more")


def _divide(train_batch_size: int, divisor: int, derived: str, world_size: int) -> int:
    """`train_batch_size / divisor`, or the error that names the batch sizes on either side."""
    quotient, rest = divmod(train_batch_size, divisor)
    if not rest:
        return quotient
    nearest = [str(n) for n in (quotient * divisor, (quotient + 1) * divisor) if n]
    known = {
        "train_micro_batch_size_per_gpu": f"gradient_accumulation_steps {divisor // world_size}",
        "gradient_accumulation_steps": f"train_micro_batch_size_per_gpu {divisor // world_size}",
    }[derived]
    raise ConfigError(
        f"train_batch_size does not divide, so {derived} cannot be derived",
        where=_WHERE,
        got=f"train_batch_size {train_batch_size}, {known}, {world_size} ranks",
        wanted=f"train_batch_size a multiple of {divisor // world_size} * {world_size} ranks = {divisor}",
        remedy=f"set train_batch_size to {' or '.join(nearest)}",
    )


def _open_triangle(train_batch_size: int, micro: int, accumulation: int, world_size: int) -> ConfigError:
    product = micro * accumulation * world_size
    sides = {
        "train_micro_batch_size_per_gpu": accumulation * world_size,
        "gradient_accumulation_steps": micro * world_size,
        "ranks": micro * accumulation,
    }
    fits = [f"train_batch_size {product}"] + [
        f"{train_batch_size // other} ranks" if name == "ranks" else f"{name} {train_batch_size // other}"
        for name, other in sides.items()
        if train_batch_size % other == 0
    ]
    return ConfigError(
        f"the batch sizes do not fit together on {world_size} ranks",
        where=_WHERE,
        got=f"train_batch_size {train_batch_size}, train_micro_batch_size_per_gpu {micro}, "
        f"gradient_accumulation_steps {accumulation}: {micro} * {accumulation} * {world_size} ranks = {product}",
        wanted="train_batch_size = train_micro_batch_size_per_gpu * gradient_accumulation_steps * ranks",
        remedy=f"change one: {', or '.join(fits)}; or leave one of the three out and it is derived",
    )

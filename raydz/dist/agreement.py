"""Let all ranks know what happened on one: results, and above all errors, so that nobody waits for a rank that left.

Neighbours: `train/setup.py` and `Engine.load_checkpoint` wrap in these whatever can fail on a single rank.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from raydz import errors
from raydz.dist.collectives import Communicator
from raydz.dist.sequence import SequenceLog, first_difference
from raydz.errors import RaydzError

T = TypeVar("T")


def on_rank_zero(comm: Communicator, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its JSON-serialisable result on every rank.

    Collective: every rank. Raises: on every rank what `work` raised as a RaydzError.
    """
    reply = _attempt(work) if comm.rank == 0 else {}
    reply = json.loads(comm.all_gather_bytes(json.dumps(reply).encode())[0])
    if "error" in reply:
        raise _rebuild(reply["error"])
    return reply["value"]


def bytes_from_rank_zero(comm: Communicator, work: Callable[[], bytes]) -> bytes:
    """Run `work` on rank 0 and return its bytes, however many, on every rank.

    Collective: every rank. Memory: the bytes once more while they travel. Raises: as `on_rank_zero`.
    """
    held = b""

    def keep() -> int:
        nonlocal held
        held = work()
        return len(held)

    size = on_rank_zero(comm, keep)
    if comm.world_size == 1:
        return held
    moved = torch.empty(size, dtype=torch.uint8)
    if size and comm.rank == 0:
        moved.copy_(torch.frombuffer(bytearray(held), dtype=torch.uint8))
    comm.broadcast(moved)
    return held if comm.rank == 0 else moved.numpy().tobytes()


def on_every_rank(comm: Communicator, work: Callable[[], T]) -> T:
    """Run `work` on every rank and return each rank's own result, if it succeeded on all.

    Collective: every rank. Raises: on every rank the RaydzError of the first rank that had one.
    """
    value: T | None = None

    def keep() -> None:
        nonlocal value
        value = work()

    replies = [json.loads(part) for part in comm.all_gather_bytes(json.dumps(_attempt(keep)).encode())]
    for rank, reply in enumerate(replies):
        if "error" in reply:
            error = _rebuild(reply["error"])
            if comm.world_size > 1:
                error.what += f" (rank {rank})"
            raise error
    return value  # type: ignore[return-value]


def _attempt(work: Callable[[], T]) -> dict:
    try:
        return {"value": work()}
    except RaydzError as error:
        fields = {k: None if v is None else str(v) for k, v in error.fields().items()}
        return {"error": {"type": _known_type(error), "retryable": error.retryable, **fields}}


def _known_type(error: RaydzError) -> str:
    """Name of the closest class in `raydz.errors`."""
    return next(cls.__name__ for cls in type(error).__mro__ if getattr(errors, cls.__name__, None) is cls)


def _rebuild(fields: dict) -> RaydzError:
    retryable = fields.pop("retryable")
    error = getattr(errors, fields.pop("type"))(**fields)
    error.retryable = retryable  # a class that only a higher layer knows may differ from its base in this
    return error


def agree_on_sequences(comm: Communicator, logs: Sequence[SequenceLog], digests: Sequence[Sequence[float]]) -> None:
    """Check that all ranks have launched the same collectives, from hashes that travelled with something else.

    Collective: every rank of `comm`, but messages only where the hashes differ.

    Args:
        digests: of every rank, in rank order: one for each log.

    Raises:
        TrainingError: on every rank, naming the first launch that differs.
    """
    if all(list(row) == list(digests[0]) for row in digests):
        return
    parts = comm.all_gather_bytes(json.dumps([log.recent() for log in logs]).encode())
    everyone = [[[(number, what) for number, what in log] for log in json.loads(part)] for part in parts]
    what = "ranks have done different things since training began"
    for index, log in enumerate(logs):
        found = first_difference([rank[index] for rank in everyone])
        if found:
            raise errors.TrainingError(
                what, where=f"launch {found[0]} of {log.name}",
                got="; ".join(f"rank {rank}: {did}" for rank, did in enumerate(found[1])),
                wanted="the same modules called in the same order on every rank",
                remedy="look for a branch, a batch count or an exception that depends on the rank",
            )  # fmt: skip
    raise errors.TrainingError(what, where="longer ago than the ranks remember")

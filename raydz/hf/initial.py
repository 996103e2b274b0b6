"""The weights that a training begins with, from a Hugging Face folder or a raydz checkpoint: each rank reads its own.

Neighbours: `train/setup.py` calls `load_initial` for `model.init_from`; `folder.py` and `checkpoint/load.py` read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from raydz import log
from raydz.checkpoint import LoadRequest, StatePiece, open_together, state_pieces
from raydz.checkpoint.find import find_checkpoint
from raydz.checkpoint.manifest import MANIFEST_NAME
from raydz.dist.agreement import on_every_rank, on_rank_zero
from raydz.errors import CheckpointError
from raydz.hf.folder import is_hf_folder, shard_keys
from raydz.hf.safetensors_file import Entry, read_header
from raydz.hf.source import BUFFER, WEIGHT
from raydz.storage import S3Options, Store, open_store

if TYPE_CHECKING:
    from raydz.engine import Engine

_READ_BYTES = 16 << 20
_READS_AT_ONCE = 8
_logger = log.get(__name__)


@dataclass(frozen=True)
class _Read:
    """Elements from `offset` on of a piece, at bytes [start, stop) of a file."""

    key: str
    start: int
    stop: int
    dtype: torch.dtype
    piece: StatePiece
    offset: int


def load_initial(engine: Engine, uri: str, options: S3Options) -> None:
    """Put the weights and buffers at `uri` into the engine, whose optimizer and counters stay as they are.

    Collective and blocking: every rank. Memory: `_READS_AT_ONCE` reads of `_READ_BYTES`.

    Raises:
        CheckpointError: on every rank: nothing known is there, or a tensor is missing or has another shape, and the
            engine is as before.
    """
    comm, store = engine.comms.world, open_store(uri, options)
    folder = on_rank_zero(comm, lambda: _find(store))
    if folder is not None:
        found, manifest = open_together(comm, store, folder)
        engine.load_from(store, found, manifest, LoadRequest(weights_only=True))
        return
    pieces = [
        piece
        for piece in state_pieces(engine.sharded, engine.optimizer, saving=False)
        if piece.kind in (WEIGHT, BUFFER)
    ]
    reads = on_every_rank(comm, lambda: list(_plan(store, pieces)))
    engine.settle()
    on_every_rank(comm, lambda: _fill(store, reads))
    for group in engine.sharded.groups:
        group.mark_updated()
    if engine.average is not None:
        engine.average.restart()
    _logger.info("weights of %s: %d tensors", store.uri, len({piece.name for piece in pieces}))


def _find(store: Store) -> str | None:
    """Folder of a raydz checkpoint; None for Hugging Face's."""
    if store.exists(MANIFEST_NAME):
        return ""
    found = find_checkpoint(store) or find_checkpoint(store, "checkpoints")
    if found is None and not is_hf_folder(store):
        raise CheckpointError(
            "no weights to begin with", where=store.uri, wanted="a Hugging Face folder or a raydz checkpoint",
            remedy="raydz convert makes one of other checkpoints",
        )  # fmt: skip
    return found


def _plan(store: Store, pieces: Sequence[StatePiece]) -> Iterator[_Read]:
    """What this rank reads, in the order of its pieces; nothing is read before all of it is there."""
    entries: dict[str, tuple[str, Entry]] = {}
    for key in shard_keys(store):
        entries |= {name: (key, entry) for name, entry in read_header(store, key)[0].items()}
    missing = sorted({piece.name for piece in pieces if not any(name in entries for name in piece.names)})
    if missing:
        raise CheckpointError(
            "the folder lacks tensors of this model", where=store.uri, got=f"{len(missing)}: {', '.join(missing[:5])}",
            wanted="all of them", remedy="set the sizes under model to those of its config.json",
        )  # fmt: skip
    for piece in pieces:
        name = next(name for name in piece.names if name in entries)
        key, entry = entries[name]
        if entry.shape != piece.shape:
            raise CheckpointError(
                "a stored tensor has another shape", where=f"{store.uri}: {name}", got=entry.shape, wanted=piece.shape,
                remedy="set the sizes under model to those of its config.json",
            )  # fmt: skip
        width = entry.dtype.itemsize
        step = _READ_BYTES // width
        for at in range(piece.start, piece.stop, step):
            stop = min(at + step, piece.stop)
            yield _Read(key, entry.start + at * width, entry.start + stop * width, entry.dtype, piece, at - piece.start)


def _fill(store: Store, reads: Sequence[_Read]) -> None:
    def work(read: _Read) -> None:
        buffer = bytearray(read.stop - read.start)
        store.read_into(read.key, read.start, memoryview(buffer))
        read.piece.write(read.offset, torch.frombuffer(buffer, dtype=read.dtype))

    with ThreadPoolExecutor(_READS_AT_ONCE, thread_name_prefix="raydz-initial") as pool:
        for _ in pool.map(work, reads):
            pass

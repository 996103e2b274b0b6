"""Writing what was found elsewhere as a raydz checkpoint, tensor by tensor.

Neighbours: `cli/convert.py` calls this; `checkpoint/writer.py` writes and commits, as at the end of a training step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from raydz.checkpoint import SaveRequest, StatePiece, checkpoint_uri, save, step_folder
from raydz.checkpoint.find import join_key
from raydz.checkpoint.manifest import MANIFEST_NAME
from raydz.checkpoint.pieces import DTYPE_NAMES
from raydz.dist import CommClock, Communicator
from raydz.errors import CheckpointError
from raydz.hf.source import Source, SourceTensor
from raydz.storage import Store


def write_checkpoint(source: Source, store: Store, done: Callable[[int], None] = lambda num_bytes: None) -> str:
    """Write and commit `step-…` in the store; returns its URI. Memory: one tensor.

    Args:
        done: told the bytes of each tensor that is written.

    Raises:
        CheckpointError: there is a checkpoint of that step already, or it could not be written.
    """
    source.require_tensors()
    folder = step_folder(source.step)
    if store.exists(join_key(folder, MANIFEST_NAME)):
        raise CheckpointError(
            "there is a checkpoint of this step already", where=checkpoint_uri(store, folder),
            remedy="nothing is overwritten: name another folder",
        )  # fmt: skip
    pieces = [_piece(item, done) for item in source.tensors if item.numel]
    state: dict[str, Any] = {
        "client": source.client, "engine": source.counters, "converted_from": {"what": source.what, "uri": source.uri},
    }  # fmt: skip
    comm = Communicator(None, ordered=True, clock=CommClock(torch.device("cpu")))
    save(SaveRequest(store, folder, source.step, pieces, source.aliases, state), comm)
    return checkpoint_uri(store, folder)


def _piece(item: SourceTensor, done: Callable[[int], None]) -> StatePiece:
    def read() -> Tensor:
        tensor = item.read().reshape(-1)
        done(item.num_bytes)
        return tensor

    def write(at: int, values: Tensor) -> None:
        raise AssertionError("a source is only read")

    if item.dtype not in DTYPE_NAMES:
        raise CheckpointError("a dtype that checkpoints do not store", where=item.name, got=item.dtype)
    return StatePiece((item.name,), item.kind, DTYPE_NAMES[item.dtype], item.shape, 0, item.numel, read, write)

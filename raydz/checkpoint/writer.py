"""Saving: every rank writes one file, rank 0 checks that all is there and commits the manifest last.

Neighbours: `engine.py` calls `save`; `data_file.py` streams a rank's bytes. No manifest, no checkpoint: whatever is
killed before the last put leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from raydz import log
from raydz.checkpoint.data_file import plan_file, write_file
from raydz.checkpoint.manifest import MANIFEST_NAME, DataFile, Manifest, Piece, TensorEntry
from raydz.checkpoint.pieces import StatePiece
from raydz.dist import Communicator
from raydz.errors import CheckpointError, RaydzError
from raydz.storage import AlreadyExists, Store
from raydz.version import __version__

_logger = log.get(__name__)


@dataclass(frozen=True)
class SaveRequest:
    """What to save, where.

    Args:
        folder: key of the checkpoint's folder in `store`.
        pieces: this rank's.
        aliases: other names of tied parameters -> the stored name.
        state: JSON-serialisable, rank 0's counts.
    """

    store: Store
    folder: str
    step: int
    pieces: Sequence[StatePiece]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]


def save(request: SaveRequest, comm: Communicator) -> None:
    """Write and commit a checkpoint, or raise the same error on every rank and leave none.

    Collective and blocking: every rank of `comm`, until the manifest is committed.

    Raises:
        CheckpointError: a rank could not write, what was written is not whole, or the folder holds a checkpoint of
            another step; names ranks and causes.
    """
    attempt = comm.all_gather_bytes(secrets.token_hex(4).encode())[0].decode()
    receipts = [json.loads(part) for part in comm.all_gather_bytes(_write_own(request, comm, attempt))]
    failed = {rank: receipt["error"] for rank, receipt in enumerate(receipts) if "error" in receipt}
    if failed:
        _remove_own(request, comm, attempt)
        _raise_failed(request, failed)
    outcome = _commit(request, comm, attempt, receipts) if comm.rank == 0 else {}
    outcome = json.loads(comm.all_gather_bytes(json.dumps(outcome).encode())[0])
    if not outcome.get("keeps_files", True):
        _remove_own(request, comm, attempt)
    if "error" in outcome:
        _raise_failed(request, {0: outcome["error"]})


def _raise_failed(request: SaveRequest, failed: dict[int, str]) -> None:
    raise CheckpointError(
        "the checkpoint was not saved", where=f"{request.store.uri}/{request.folder}",
        got="; ".join(f"rank {rank}: {text}" for rank, text in sorted(failed.items())),
        wanted="every rank's file and a manifest", remedy="earlier checkpoints are untouched; mend the cause",
    )  # fmt: skip


def _file_name(attempt: str, comm: Communicator) -> str:
    return f"{attempt}/rank-{comm.rank:05d}-of-{comm.world_size:05d}.safetensors"


def _write_own(request: SaveRequest, comm: Communicator, attempt: str) -> bytes:
    """Write this rank's file; the receipt, or what went wrong, as JSON."""
    path = _file_name(attempt, comm)
    try:
        if comm.rank == 0:
            _check_state(request)
        plan = plan_file(request.pieces)
        with request.store.writer(f"{request.folder}/{path}", plan.total_bytes) as out:
            data_file = write_file(plan, out, path)
    except (RaydzError, OSError) as error:
        return json.dumps({"error": str(error).replace("\n", " ")}).encode()
    pieces = [
        [p.name, p.kind, p.dtype, list(p.shape), p.start, p.stop, offset]
        for p, offset in zip(plan.pieces, plan.offsets, strict=True)
    ]
    return json.dumps({"file": asdict(data_file), "pieces": pieces}).encode()


def _check_state(request: SaveRequest) -> None:
    try:
        json.dumps(dict(request.state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state beside the tensors cannot be written as JSON", got=error, wanted="numbers, text, lists and dicts"
        ) from None


def _commit(request: SaveRequest, comm: Communicator, attempt: str, receipts: list[dict]) -> dict[str, Any]:
    """Check and commit on rank 0; says what went wrong, and whether the data files stay."""
    where = f"{request.store.uri}/{request.folder}"
    try:
        manifest = build_manifest(request, comm.world_size, attempt, receipts)
        manifest.check_coverage(where)
        for data_file in manifest.files:
            found = request.store.head(f"{request.folder}/{data_file.path}")
            if found is None or found.bytes != data_file.bytes:
                size = None if found is None else found.bytes
                raise CheckpointError(
                    "a data file is not what was written", where=data_file.path, got=size, wanted=data_file.bytes
                )
    except (RaydzError, OSError) as error:
        return {"error": str(error).replace("\n", " "), "keeps_files": False}
    return _put_manifest(request, manifest)


def _put_manifest(request: SaveRequest, manifest: Manifest) -> dict[str, Any]:
    """Commit once; a manifest that is there already is ours (a lost reply) or another attempt's, which then counts.

    After a put that failed in any other way nobody knows whether the manifest is there or will be yet. The data files
    stay then: a committed checkpoint without them would be the newest one and could not be loaded.
    """
    key = f"{request.folder}/{MANIFEST_NAME}"
    try:
        try:
            request.store.put(key, manifest.to_bytes(), if_absent=True)
            return {}
        except AlreadyExists:
            winner = Manifest.from_bytes(request.store.get(key), f"{request.store.uri}/{key}")
    except (RaydzError, OSError) as error:
        return {"error": str(error).replace("\n", " ")}
    if winner.attempt == manifest.attempt:
        return {}
    if winner.step != manifest.step:
        text = f"{key} is there already, of step {winner.step}; nothing is overwritten, save under another name"
        return {"error": text, "keeps_files": False}
    _logger.warning("%s was committed by attempt %s; ours is dropped", key, winner.attempt)
    return {"keeps_files": False}


def build_manifest(request: SaveRequest, world_size: int, attempt: str, receipts: list[dict]) -> Manifest:
    """Join the ranks' receipts."""
    pieces: dict[tuple[str, str], list[Piece]] = {}
    heads: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for index, receipt in enumerate(receipts):
        for name, kind, dtype, shape, start, stop, offset in receipt["pieces"]:
            pieces.setdefault((name, kind), []).append(Piece(start, stop, index, offset))
            heads[name, kind] = (dtype, tuple(shape))
    tensors = {
        key: TensorEntry(*key, *heads[key], tuple(sorted(found, key=lambda piece: piece.start)))
        for key, found in pieces.items()
    }
    files = tuple(DataFile(**{**r["file"], "chunk_crcs": tuple(r["file"]["chunk_crcs"])}) for r in receipts)
    return Manifest(
        step=request.step, world_size=world_size, attempt=attempt, created=time.time(), raydz_version=__version__,
        files=files, tensors=tensors, aliases=dict(request.aliases), state=dict(request.state),
    )  # fmt: skip


def _remove_own(request: SaveRequest, comm: Communicator, attempt: str) -> None:
    """Take back this rank's file of a save that failed; a store that is gone keeps it for the sweep."""
    try:
        request.store.delete([f"{request.folder}/{_file_name(attempt, comm)}"])
    except RaydzError as error:
        _logger.warning("a file of the failed save stays behind: %s", error.what)

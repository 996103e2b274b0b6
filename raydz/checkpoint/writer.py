"""Saving: every rank writes one file, rank 0 checks that all is there and commits the manifest last.

Neighbours: `engine.py` calls `save`; `data_file.py` streams a rank's bytes. No manifest, no checkpoint: whatever is
killed before the last put leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raydz import log
from raydz.checkpoint.data_file import FilePlan, plan_file, write_file
from raydz.checkpoint.garbage import collection_paused
from raydz.checkpoint.manifest import MANIFEST_NAME, DataFile, Manifest, Piece, TensorEntry
from raydz.checkpoint.pieces import StatePiece
from raydz.dist import Communicator
from raydz.errors import CheckpointError, RaydzError
from raydz.storage import AlreadyExists, Store
from raydz.version import __version__

_LOOKS_AT_ONCE = 16
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


@dataclass(frozen=True)
class Part:
    """One rank's share of one save."""

    request: SaveRequest
    attempt: str
    rank: int
    world_size: int

    @property
    def path(self) -> str:
        """Of its data file, relative to the checkpoint's folder."""
        return f"{self.attempt}/rank-{self.rank:05d}-of-{self.world_size:05d}.safetensors"

    @property
    def key(self) -> str:
        return f"{self.request.folder}/{self.path}"

    def write(self, plan_it: Callable[[], FilePlan], send: Callable[[FilePlan, Part], DataFile]) -> dict[str, Any]:
        """Plan the data file and have it written; the receipt, or what went wrong."""
        try:
            if self.rank == 0:
                _check_state(self.request)
            plan = plan_it()
            return receipt_of(plan, send(plan, self))
        except (RaydzError, OSError) as error:
            return {"error": str(error).replace("\n", " ")}

    def remove(self) -> None:
        """Take back the file of a save that failed; a store that is gone keeps it for the sweep."""
        try:
            self.request.store.delete([self.key])
        except RaydzError as error:
            _logger.warning("a file of the failed save stays behind: %s", error.what)

    def decide(self, receipts: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: commit if every rank has written; says what went wrong, and whether the data files stay."""
        failed = {rank: receipt["error"] for rank, receipt in enumerate(receipts) if "error" in receipt}
        if failed:
            text = "; ".join(f"rank {rank}: {cause}" for rank, cause in sorted(failed.items()))
            return {"error": text, "keeps_files": False}
        outcome = _commit(self.request, self.world_size, self.attempt, receipts)
        if "error" in outcome:
            return outcome | {"error": f"rank 0: {outcome['error']}"}
        return outcome | {"bytes": sum(receipt["file"]["bytes"] for receipt in receipts)}

    def conclude(self, outcome: Mapping[str, Any]) -> int:
        """On every rank: take the file back if it is not wanted; returns the bytes of all ranks' files.

        Raises:
            CheckpointError: the save failed.
        """
        if not outcome.get("keeps_files", True):
            self.remove()
        if "error" in outcome:
            raise CheckpointError(
                "the checkpoint was not saved", where=f"{self.request.store.uri}/{self.request.folder}",
                got=outcome["error"], wanted="every rank's file and a manifest",
                remedy="earlier checkpoints are untouched; mend the cause",
            )  # fmt: skip
        return int(outcome["bytes"])


def new_attempt() -> str:
    """A name for a save, unlike that of any other."""
    return secrets.token_hex(4)


def save(request: SaveRequest, comm: Communicator) -> int:
    """Write and commit a checkpoint, or raise the same error on every rank and leave none; returns all ranks' bytes.

    Collective and blocking: every rank of `comm`, until the manifest is committed.

    Raises:
        CheckpointError: a rank could not write, what was written is not whole, or the folder holds a checkpoint of
            another step; names ranks and causes.
    """
    attempt = comm.all_gather_bytes(new_attempt().encode())[0].decode()
    part = Part(request, attempt, comm.rank, comm.world_size)
    receipt = part.write(lambda: plan_file(request.pieces), _stream)
    receipts = comm.all_gather_bytes(json.dumps(receipt).encode())
    outcome = part.decide(decode_receipts(receipts)) if comm.rank == 0 else {}
    return part.conclude(json.loads(comm.all_gather_bytes(json.dumps(outcome).encode())[0]))


def decode_receipts(texts: Sequence[bytes | str]) -> list[dict[str, Any]]:
    """What the ranks wrote of their files, as they sent it."""
    with collection_paused():
        return [json.loads(text) for text in texts]


def _stream(plan: FilePlan, part: Part) -> DataFile:
    """Write piece by piece from where the state lives."""
    with part.request.store.writer(part.key, plan.total_bytes) as out:
        return write_file(plan, out, part.path)


def receipt_of(plan: FilePlan, data_file: DataFile) -> dict[str, Any]:
    """What rank 0 needs to know of a data file, as JSON values."""
    pieces = [
        [p.name, p.kind, p.dtype, list(p.shape), p.start, p.stop, offset]
        for p, offset in zip(plan.pieces, plan.offsets, strict=True)
    ]
    return {"file": data_file.as_json(), "pieces": pieces}


def _check_state(request: SaveRequest) -> None:
    try:
        json.dumps(dict(request.state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state beside the tensors cannot be written as JSON", got=error, wanted="numbers, text, lists and dicts"
        ) from None


def _commit(request: SaveRequest, world_size: int, attempt: str, receipts: list[dict]) -> dict[str, Any]:
    """Check and commit on rank 0; says what went wrong, and whether the data files stay."""
    where = f"{request.store.uri}/{request.folder}"
    try:
        manifest = build_manifest(request, world_size, attempt, receipts)
        manifest.check_coverage(where)
        with ThreadPoolExecutor(_LOOKS_AT_ONCE, thread_name_prefix="raydz-look") as pool:
            looks = pool.map(lambda file: request.store.head(f"{request.folder}/{file.path}"), manifest.files)
            there = list(looks)  # a thousand files one after the other would take half a minute on S3
        for data_file, found in zip(manifest.files, there, strict=True):
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


@collection_paused()
def build_manifest(request: SaveRequest, world_size: int, attempt: str, receipts: list[dict]) -> Manifest:
    """Join the ranks' receipts."""
    pieces: dict[tuple[str, str], list[Piece]] = {}
    heads: dict[tuple[str, str], tuple[str, tuple[int, ...]]] = {}
    for index, receipt in enumerate(receipts):
        for name, kind, dtype, shape, start, stop, offset in receipt["pieces"]:
            key = (name, kind)
            if key not in heads:
                heads[key], pieces[key] = (dtype, tuple(shape)), []
            pieces[key].append(Piece(start, stop, index, offset))
    tensors = {key: TensorEntry(*key, *heads[key], tuple(sorted(found))) for key, found in pieces.items()}
    files = tuple(DataFile.from_json(receipt["file"], "a receipt") for receipt in receipts)
    return Manifest(
        step=request.step, world_size=world_size, attempt=attempt, created=time.time(), raydz_version=__version__,
        files=files, tensors=tensors, aliases=dict(request.aliases), state=dict(request.state),
    )  # fmt: skip

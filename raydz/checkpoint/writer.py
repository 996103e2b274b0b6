"""Saving: every rank writes one file, rank 0 checks that all is there and commits the manifest last.

Neighbours: `engine.py` calls `save`; `data_file.py` streams a rank's bytes, `receipts.py` joins what the ranks say. No
manifest, no checkpoint: whatever is killed before the last put leaves the previous checkpoint as it was.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from raydz import log
from raydz.checkpoint.data_file import FilePlan, plan_file, write_file
from raydz.checkpoint.find import set_aside
from raydz.checkpoint.generations import Fence, read_history
from raydz.checkpoint.manifest import MANIFEST_NAME, DataFile, Manifest
from raydz.checkpoint.pieces import StatePiece
from raydz.checkpoint.receipts import build_manifest, decode_receipts, receipt_of
from raydz.dist import Communicator
from raydz.errors import CheckpointError, RaydzError, Superseded
from raydz.storage import AlreadyExists, Store

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
        fence: on rank 0 of a run: asked before and after the commit.
    """

    store: Store
    folder: str
    step: int
    pieces: Sequence[StatePiece]
    aliases: Mapping[str, str]
    state: Mapping[str, Any]
    fence: Fence | None = None


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
        outcome = _commit(self.request, self.attempt, receipts)
        if "error" in outcome:
            return outcome | {"error": f"rank 0: {outcome['error']}"}
        if "superseded" in outcome:
            return outcome
        return outcome | {"bytes": sum(receipt["file"]["bytes"] for receipt in receipts)}

    def conclude(self, outcome: Mapping[str, Any]) -> int:
        """On every rank: take the file back if it is not wanted; returns the bytes of all ranks' files.

        Raises:
            CheckpointError: the save failed.
            Superseded: a newer start of the run has taken over.
        """
        if not outcome.get("keeps_files", True):
            self.remove()
        if "superseded" in outcome:
            raise Superseded(**outcome["superseded"])
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


def _stream(plan: FilePlan, part: Part) -> DataFile:
    """Write piece by piece from where the state lives."""
    with part.request.store.writer(part.key, plan.total_bytes) as out:
        return write_file(plan, out, part.path)


def _check_state(request: SaveRequest) -> None:
    try:
        json.dumps(dict(request.state))
    except (TypeError, ValueError) as error:
        raise CheckpointError(
            "the state beside the tensors cannot be written as JSON", got=error, wanted="numbers, text, lists and dicts"
        ) from None


def _commit(request: SaveRequest, attempt: str, receipts: list[dict]) -> dict[str, Any]:
    """Check and commit on rank 0; says what went wrong, and whether the data files stay."""
    where = f"{request.store.uri}/{request.folder}"
    try:
        manifest = build_manifest(
            receipts, step=request.step, attempt=attempt, aliases=request.aliases, state=_tagged(request)
        )
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
        if request.fence is not None:
            request.fence.check()
    except Superseded as error:
        return {"superseded": error.fields(), "keeps_files": False}
    except (RaydzError, OSError) as error:
        return {"error": str(error).replace("\n", " "), "keeps_files": False}
    outcome = _put_manifest(request, manifest)
    return outcome if request.fence is None or outcome else _still_ours(request.fence)


def _tagged(request: SaveRequest) -> dict[str, Any]:
    return {**request.state, **({"generation": request.fence.tag} if request.fence is not None else {})}


def _still_ours(fence: Fence) -> dict[str, Any]:
    """After the commit: whether a newer generation was claimed meanwhile, which then decides whether it counts."""
    try:
        fence.check()
    except Superseded as error:
        return {"superseded": error.fields()}
    except RaydzError as error:
        _logger.warning("committed, and then the store did not answer: %s", error.what)
    return {}


def _came_too_late(request: SaveRequest, winner: Manifest) -> bool:
    """Whether an older generation committed it after ours began."""
    if request.fence is None:
        return False
    return read_history(request.fence.store).superseding(winner.generation, winner.step) is not None


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
            if _came_too_late(request, winner):
                _logger.warning("%s, of generation %s, came too late and is set aside", key, winner.generation)
                set_aside(request.store, request.folder)
                request.store.put(key, manifest.to_bytes(), if_absent=True)
                return {}
    except (RaydzError, OSError) as error:
        return {"error": str(error).replace("\n", " ")}
    if winner.attempt == manifest.attempt:
        return {}
    if winner.step != manifest.step:
        text = f"{key} is there already, of step {winner.step}; nothing is overwritten, save under another name"
        return {"error": text, "keeps_files": False}
    _logger.warning("%s was committed by attempt %s; ours is dropped", key, winner.attempt)
    return {"keeps_files": False}

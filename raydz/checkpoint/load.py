"""A load from plan to report: what is asked for, under which names, read by whom, and what did not match.

Neighbours: `access.py` calls `load_pieces`; `load_plan.py` plans, `reader.py` reads, `key_map.py` renames.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from raydz import log
from raydz.checkpoint.find import checkpoint_uri
from raydz.checkpoint.key_map import KeyMap, rename_tensors
from raydz.checkpoint.load_plan import LoadPlan, plan_load
from raydz.checkpoint.manifest import Manifest
from raydz.checkpoint.pieces import StatePiece
from raydz.checkpoint.reader import CheckpointReader
from raydz.dist import Communicator
from raydz.dist.agreement import on_every_rank
from raydz.errors import CheckpointError, ConfigError
from raydz.storage import Store
from raydz.zero import Communicators

_logger = log.get(__name__)
_MODEL_KINDS = ("weight", "buffer")

TensorId = tuple[str, str]
"""(name, kind)"""


@dataclass(frozen=True)
class LoadRequest:
    """What of a checkpoint to load; by default all that the engine holds.

    Args:
        weights_only: weights and buffers, neither optimizer states nor counters.
        only: globs of the model's names (`model.layers.*`); nothing else is touched, and no counter.
        missing: what the checkpoint lacks is an error, or keeps its present values.
        key_map: stored names -> the model's.
    """

    weights_only: bool = False
    only: tuple[str, ...] = ()
    missing: Literal["error", "keep"] = "error"
    key_map: KeyMap | None = None

    def __post_init__(self) -> None:
        if self.missing not in ("error", "keep"):
            raise ConfigError("an unknown rule", where="missing", got=self.missing, wanted="error or keep")
        if isinstance(self.only, str):
            raise ConfigError("not a list of patterns", where="only", got=self.only, wanted=f'["{self.only}"]')

    @property
    def is_partial(self) -> bool:
        """Whether training cannot go on from what is loaded alone: then counters stay as they are."""
        return self.weights_only or bool(self.only)

    def selects(self, names: Iterable[str], kind: str) -> bool:
        if self.weights_only and kind not in _MODEL_KINDS:
            return False
        return not self.only or any(fnmatchcase(name, pattern) for name in names for pattern in self.only)


@dataclass(frozen=True)
class LoadReport:
    """What a load did, the same on every rank but for `bytes_read`; names are the model's where it has them.

    Attributes:
        loaded: (name, kind) of tensors that were read.
        renamed: the model's name -> the stored name, of what was loaded under another one.
        kept: of the model and asked for, but not stored: as before the load.
        unused: stored and asked for, but the model has no place for it.
        idle_rules: of the key map, those that met no stored name.
        bytes_read: from the store, by this rank.
    """

    loaded: tuple[TensorId, ...]
    renamed: dict[str, str]
    kept: tuple[TensorId, ...]
    unused: tuple[TensorId, ...]
    idle_rules: tuple[str, ...]
    bytes_read: int = 0

    def describe(self) -> str:
        """One line for people, with the first names of whatever did not match."""
        parts = [f"{len(self.loaded)} tensors loaded", f"{len(self.renamed)} renamed"]
        for what, found in (("kept", self.kept), ("unused", self.unused)):
            parts.append(f"{len(found)} {what}" + (f" ({_first_names(found)})" if found else ""))
        if self.idle_rules:
            parts.append(f"rules of the key map that met nothing: {', '.join(self.idle_rules[:5])}")
        return ", ".join(parts)


def load_pieces(
    store: Store, folder: str, manifest: Manifest, pieces: Sequence[StatePiece], request: LoadRequest,
    comms: Communicators,
) -> LoadReport:  # fmt: skip
    """Fill this rank's pieces from the checkpoint in `folder`; what several ranks hold alike is read once for them.

    Nothing is written before every rank's plan is complete and all files are there in full size, so a checkpoint that
    does not fit the model or lacks a file changes nothing. A damaged chunk is found when it is read: other pieces are
    loaded then.

    Collective: every rank. Memory: see `reader.CheckpointReader`.

    Raises:
        CheckpointError: on every rank: a tensor is missing or has another shape; a file is missing, short or damaged
            (names file and chunk); the key map makes two tensors one; a pattern of `only` matches nothing.
    """
    where = checkpoint_uri(store, folder)
    key_map = request.key_map or KeyMap({}, {})
    manifest, renamed, idle = rename_tensors(manifest, key_map, where)  # alike on every rank
    chosen = [piece for piece in pieces if request.selects(piece.names, piece.kind)]
    plans = on_every_rank(comms.world, lambda: _plan_by_holders(manifest, chosen, where))
    report = _report(manifest, chosen, plans, request, where, comms.world)
    taken = {name for name, _ in report.loaded}
    renamed = {name: stored for name, stored in renamed.items() if name in taken}
    reader = CheckpointReader(store, folder, manifest)
    runs = {holders: plan.runs(manifest.files) for holders, plan in plans.items()}
    groups = {"world": comms.world, "replicas": comms.replica}
    mine = [run for name, comm in groups.items() if comm for run in runs[name][comm.rank :: comm.world_size]]
    on_every_rank(comms.world, lambda: reader.check_there(run.file for run in runs["one"] + mine))
    reader.fill_together(runs["world"], comms.world)

    def fill_rest() -> None:
        if comms.replica is not None:
            reader.fill_together(runs["replicas"], comms.replica)
        reader.fill(runs["one"])

    on_every_rank(comms.world, fill_rest)
    return LoadReport(report.loaded, renamed, report.kept, report.unused, tuple(idle), reader.bytes_read)


def _plan_by_holders(manifest: Manifest, pieces: Sequence[StatePiece], where: str) -> dict[str, LoadPlan]:
    return {
        holders: plan_load(manifest, [piece for piece in pieces if piece.holders == holders], where)
        for holders in ("one", "replicas", "world")
    }


def _report(
    manifest: Manifest, chosen: Sequence[StatePiece], plans: dict[str, LoadPlan], request: LoadRequest, where: str,
    comm: Communicator,
) -> LoadReport:  # fmt: skip
    """Join what every rank takes and misses; a rank knows only the tensors it holds a part of."""
    stored = sorted(manifest.tensors)
    taken = set().union(*(plan.taken for plan in plans.values()))
    message = {
        # A bit a stored tensor: at 1,024 ranks their names would be megabytes.
        "taken": hex(sum(1 << index for index, key in enumerate(stored) if key in taken)),
        "missing": sorted({key for plan in plans.values() for key in plan.missing}),
        "met": [i for i, pattern in enumerate(request.only) if _meets(pattern, chosen)],
    }
    replies = [json.loads(part) for part in comm.all_gather_bytes(json.dumps(message).encode())]
    bits = 0
    for reply in replies:
        bits |= int(reply["taken"], 16)
    met = {index for reply in replies for index in reply["met"]}
    if len(met) < len(request.only):
        idle = [pattern for index, pattern in enumerate(request.only) if index not in met]
        raise CheckpointError(
            "a pattern matches nothing of the model", where="only", got=", ".join(idle),
            wanted="globs of parameter and buffer names",
        )  # fmt: skip
    kept = tuple(sorted({(name, kind) for reply in replies for name, kind in reply["missing"]}))
    if kept and request.missing == "error":
        raise CheckpointError(
            "the checkpoint lacks tensors of this model", where=where,
            got=f"{len(kept)} missing: {_first_names(kept)}", wanted="all of them",
            remedy="load it into the model it was saved from; or give a key_map, a list `only`, or missing='keep'",
        )  # fmt: skip
    loaded = tuple(key for index, key in enumerate(stored) if bits >> index & 1)
    rest = set(stored).difference(loaded)
    unused = tuple(key for key in stored if key in rest and request.selects([key[0]], key[1]))
    return LoadReport(loaded, {}, kept, unused, ())


def _meets(pattern: str, pieces: Sequence[StatePiece]) -> bool:
    return any(fnmatchcase(name, pattern) for piece in pieces for name in piece.names)


def _first_names(found: Sequence[TensorId]) -> str:
    names = [f"{name} ({kind})" for name, kind in found[:5]]
    return ", ".join(names) + (", …" if len(found) > 5 else "")


def log_report(report: LoadReport, where: str, rank: int) -> None:
    """Say on rank 0 how a load went, as a warning where something did not match."""
    if rank == 0:
        has_rest = report.kept or report.unused or report.idle_rules
        (_logger.warning if has_rest else _logger.info)("%s: %s", where, report.describe())

"""What is in a folder of checkpoints, and what is in one checkpoint, from manifests alone: no tensor is read.

Neighbours: `checkpoint_commands.py` prints this; `raydz.checkpoint` finds and verifies the manifests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Any

from raydz.checkpoint import Manifest, checkpoint_uri
from raydz.checkpoint.find import join_key
from raydz.checkpoint.manifest import MANIFEST_NAME
from raydz.errors import CheckpointError
from raydz.storage import Store


@dataclass(frozen=True)
class Listed:
    """A committed checkpoint; `fault` says why its manifest cannot be used, and then `summary` is empty."""

    folder: str
    summary: dict[str, Any]
    fault: str | None = None


@dataclass(frozen=True)
class Listing:
    """Committed checkpoints, oldest first, and names of folders of steps that have no manifest."""

    committed: list[Listed]
    uncommitted: list[str]


def list_checkpoints(store: Store) -> Listing:
    """All checkpoints directly in the store, in its folder `checkpoints`, or in that of each run below it.

    Raises:
        CheckpointError: there is none at all.
    """
    for folders in _candidates(store):
        listing = Listing([], [])
        for folder in folders:
            _look_into(store, folder, listing)
        if listing.committed or listing.uncommitted:
            listing.committed.sort(key=lambda item: (item.folder.rpartition("/")[0], item.summary.get("step", -1)))
            return listing
    raise CheckpointError(
        "no checkpoint here", where=store.uri,
        wanted="a folder of runs, a run's folder, or one that holds step-... folders",
        remedy="look for <checkpoint.dir>/<run.name>/checkpoints",
    )  # fmt: skip


def checkpoint_folders(store: Store) -> list[str]:
    """Folders that hold folders of steps, at the store's root or below it.

    Raises:
        CheckpointError: there is none.
    """
    listing = list_checkpoints(store)
    found = [*(item.folder for item in listing.committed), *listing.uncommitted]
    return sorted({folder.rpartition("/")[0] for folder in found})


def _candidates(store: Store) -> Iterator[list[str]]:
    """Folders that may hold checkpoints, the nearest first; runs below are looked for only when those hold none."""
    yield ["", "checkpoints"]
    yield [f"{name}/checkpoints" for name in store.list_folders()]


def _look_into(store: Store, folder: str, listing: Listing) -> None:
    for name in store.list_folders(folder):
        checkpoint = join_key(folder, name)
        key = join_key(checkpoint, MANIFEST_NAME)
        if store.exists(key):
            listing.committed.append(_read(store, checkpoint, key))
        elif name.startswith("step-"):
            listing.uncommitted.append(checkpoint)


def _read(store: Store, folder: str, key: str) -> Listed:
    try:
        manifest = Manifest.from_bytes(store.get(key), f"{store.uri}/{key}")
    except CheckpointError as error:
        return Listed(folder, {}, error.what)
    return Listed(folder, summarise(manifest))


def summarise(manifest: Manifest) -> dict[str, Any]:
    """The figures of one line."""
    return {
        "step": manifest.step,
        "saved": datetime.fromtimestamp(manifest.created, timezone.utc).strftime("%Y-%m-%d %H:%M:%SZ"),
        "world_size": manifest.world_size,
        "tensors": len(manifest.tensors),
        "bytes": sum(data_file.bytes for data_file in manifest.files),
        "raydz_version": manifest.raydz_version,
    }


def describe(store: Store, folder: str, manifest: Manifest) -> dict[str, Any]:
    """Everything about one checkpoint that fits on a page: figures, tensors by kind and dtype, files, state."""
    kinds: dict[str, dict[str, int]] = defaultdict(lambda: {"tensors": 0, "elements": 0})
    for entry in manifest.tensors.values():
        count = kinds[f"{entry.kind} {entry.dtype}"]
        count["tensors"] += 1
        count["elements"] += entry.numel
    return {
        "uri": checkpoint_uri(store, folder),
        **summarise(manifest),
        "kinds": dict(sorted(kinds.items())),
        "files": {data_file.path: data_file.bytes for data_file in manifest.files},
        "tied": dict(manifest.aliases),
        "state": sorted(manifest.state),
    }

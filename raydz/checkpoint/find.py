"""Which checkpoint to load: the newest committed one of a run, or exactly the one that was named.

Neighbours: `train/resume.py` asks on rank 0 and tells the others; `cli/` lists with it.
"""

from __future__ import annotations

import re

from raydz.checkpoint.generations import TAG_BYTES, History, read_history, tag_of
from raydz.checkpoint.manifest import MANIFEST_NAME, Manifest
from raydz.dist import Communicator
from raydz.dist.agreement import bytes_from_rank_zero, on_every_rank, on_rank_zero
from raydz.errors import CheckpointError
from raydz.storage import NotFound, Store

_STEP_FOLDER = re.compile(r"step-(\d{10})")


def step_folder(step: int) -> str:
    """Name of the folder of a step's checkpoint; sorts by step."""
    return f"step-{step:010d}"


def step_of(folder: str) -> int | None:
    """The step of a folder that `step_folder` named; None for any other name."""
    match = _STEP_FOLDER.fullmatch(folder)
    return int(match[1]) if match else None


def join_key(folder: str, name: str) -> str:
    """The key of `name` in `folder`; an empty folder is the store's own."""
    return f"{folder}/{name}" if folder else name


def checkpoint_uri(store: Store, folder: str) -> str:
    """What a user passes to `resume`."""
    return f"{store.uri.rstrip('/')}/{folder}" if folder else store.uri


def committed_steps(store: Store, folder: str = "") -> list[int]:
    """Steps of all committed checkpoints directly under `folder`, ascending; without those that came too late.

    See "Generations" in README.md.
    """
    steps = sorted(step for name in store.list_folders(folder) if (step := step_of(name)) is not None)
    history = read_history(store, folder) if steps else History()
    return [step for step in steps if _counts(store, join_key(folder, step_folder(step)), step, history)]


def _counts(store: Store, folder: str, step: int, history: History) -> bool:
    key = join_key(folder, MANIFEST_NAME)
    if history.floor is None or step <= history.floor:
        return store.exists(key)
    try:
        return history.superseding(tag_of(store.get(key, 0, TAG_BYTES)), step) is None
    except NotFound:
        return False


def find_checkpoint(store: Store, folder: str = "") -> str | None:
    """Folder of the newest committed checkpoint under `folder`, or None; uncommitted ones are invisible."""
    steps = committed_steps(store, folder)
    return join_key(folder, step_folder(steps[-1])) if steps else None


def open_checkpoint(store: Store, folder: str = "") -> tuple[str, Manifest]:
    """The checkpoint at `folder` itself, or the newest directly under it: its folder and manifest.

    Raises:
        CheckpointError: there is none, or its manifest is damaged.
    """
    found, data = _read_manifest(store, folder)
    return found, Manifest.from_bytes(data, f"{store.uri}/{join_key(found, MANIFEST_NAME)}")


def open_together(comm: Communicator, store: Store, folder: str = "") -> tuple[str, Manifest]:
    """`open_checkpoint` on every rank, for one read of the store: rank 0's choice and its manifest count.

    Collective: every rank. Raises: the same on every rank.
    """
    data = b""

    def read() -> str:
        nonlocal data
        found, data = _read_manifest(store, folder)
        return found

    found = on_rank_zero(comm, read)
    data = bytes_from_rank_zero(comm, lambda: data)
    where = f"{store.uri}/{join_key(found, MANIFEST_NAME)}"
    return found, on_every_rank(comm, lambda: Manifest.from_bytes(data, where))


def set_aside(store: Store, folder: str) -> None:
    """Make a checkpoint that is damaged, or came too late, invisible, and its folder free for the same step again.

    Its manifest stays there as `set-aside.json`, so that people can look at what happened.
    """
    key = join_key(folder, MANIFEST_NAME)
    store.put(join_key(folder, "set-aside.json"), store.get(key))
    store.delete([key])


def _read_manifest(store: Store, folder: str) -> tuple[str, bytes]:
    found = folder if store.exists(join_key(folder, MANIFEST_NAME)) else find_checkpoint(store, folder)
    if found is None:
        raise CheckpointError(
            "no committed checkpoint here", where=checkpoint_uri(store, folder), got="no manifest.json",
            wanted="a checkpoint's folder, or a run's folder that holds one",
            remedy="a save that was interrupted leaves none; name an earlier step, or set resume to never",
        )  # fmt: skip
    return found, store.get(join_key(found, MANIFEST_NAME))

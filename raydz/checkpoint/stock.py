"""What lies in a run's folder of checkpoints, from one listing: whole ones, damaged ones, and what nobody committed.

Neighbours: `sweep.py` decides by it what to delete. Manifests are read once: a committed one never changes.
"""

from __future__ import annotations

import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from raydz.checkpoint.find import join_key, step_of
from raydz.checkpoint.generations import FOLDER, History
from raydz.checkpoint.manifest import MANIFEST_NAME, Manifest
from raydz.checkpoint.retention import Whole
from raydz.errors import CheckpointError
from raydz.storage import NotFound, Store, StoredObject

_ATTEMPT = re.compile(r"[0-9a-f]{8}")
_Objects = dict[str, StoredObject]
"""Of one step's folder, by what follows its name."""


@dataclass(frozen=True)
class Committed:
    """A checkpoint that has a manifest.

    Attributes:
        attempt: of the save that wrote it; None where the manifest cannot be read.
        files: its data files by key, and their sizes.
        fault: why it cannot be loaded; None if it can.
    """

    folder: str
    step: int
    attempt: str | None
    files: Mapping[str, int] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    fault: str | None = None
    generation: str | None = None

    @property
    def num_bytes(self) -> int:
        """Of its data."""
        return sum(self.files.values())


@dataclass(frozen=True)
class Orphan:
    """Data files of one save that was not committed, or whose manifest was deleted.

    Attributes:
        age_s: since the newest of them was written.
    """

    folder: str
    attempt: str
    keys: tuple[str, ...]
    num_bytes: int
    age_s: float


@dataclass(frozen=True)
class Stock:
    """By step, ascending."""

    committed: tuple[Committed, ...]
    orphans: tuple[Orphan, ...]

    @property
    def whole(self) -> list[Whole]:
        """What retention may choose from."""
        return [Whole(found.step, found.metrics) for found in self.committed if found.fault is None]

    @property
    def damaged(self) -> list[Committed]:
        """What has a manifest and cannot be loaded."""
        return [found for found in self.committed if found.fault is not None]


class StockTaker:
    """Takes stock of one folder again and again; remembers manifests by size and time.

    Args:
        reads_all: False leaves manifests unread where no orphan lies beside them: then nobody knows metrics, or damage.
    """

    def __init__(self, store: Store, folder: str = "", *, reads_all: bool = True) -> None:
        self._store, self._folder, self._reads_all = store, folder, reads_all
        self._known: dict[StoredObject, Committed] = {}

    def take(self) -> Stock:
        """Look. Raises: StorageError."""
        by_folder, history = self._listing()
        now = time.time()
        committed: list[Committed] = []
        orphans: list[Orphan] = []
        for folder, objects in sorted(by_folder.items()):
            found = self._found(folder, objects) if MANIFEST_NAME in objects else None
            if found is not None:
                committed.append(_compared(_in_time(found, history), objects))
            if found is None or found.attempt is not None:  # else nobody knows which attempt is the committed one
                orphans += _orphans(folder, objects, found.attempt if found else None, now)
        manifests = {objects.get(MANIFEST_NAME) for objects in by_folder.values()}
        self._known = {found: known for found, known in self._known.items() if found in manifests}
        return Stock(tuple(committed), tuple(orphans))

    def _listing(self) -> tuple[dict[str, _Objects], History]:
        by_folder: dict[str, _Objects] = defaultdict(dict)
        generations = []
        root = f"{self._folder}/" if self._folder else ""
        for found in self._store.list_objects(root):
            name, _, below = found.key.removeprefix(root).partition("/")
            if step_of(name) is not None and below:
                by_folder[root + name][below] = found
            elif name == FOLDER:
                generations.append(below)
        return by_folder, History.of(generations)

    def _found(self, folder: str, objects: _Objects) -> Committed | None:
        step = step_of(folder.rpartition("/")[2])
        assert step is not None, "of a folder that was listed for its step"
        attempts = {below.partition("/")[0] for below in objects if "/" in below}
        if not self._reads_all and len(attempts) == 1:
            files = {found.key: found.bytes for below, found in objects.items() if "/" in below}
            return Committed(folder, step, attempts.pop(), files)
        return self._read(folder, step, objects[MANIFEST_NAME])

    def _read(self, folder: str, step: int, found: StoredObject) -> Committed | None:
        known = self._known.get(found)
        if known is None:
            try:
                manifest = Manifest.from_bytes(self._store.get(found.key), f"{self._store.uri}/{found.key}")
            except NotFound:
                return None  # deleted since it was listed
            except CheckpointError as error:
                return Committed(folder, step, None, fault=error.what)
            known = self._known[found] = _summary(folder, step, manifest)
        return known


def _summary(folder: str, step: int, manifest: Manifest) -> Committed:
    files = {join_key(folder, file.path): file.bytes for file in manifest.files}
    fault = None if manifest.step == step else f"its manifest is of step {manifest.step}"
    metrics = _numbers(manifest.state.get("metrics"))
    return Committed(folder, step, manifest.attempt, files, metrics, fault, manifest.generation)


def _in_time(found: Committed, history: History) -> Committed:
    """The same; with a fault if a start of the run that had been replaced committed it."""
    newer = history.superseding(found.generation, found.step)
    if newer is None or found.fault is not None:
        return found
    return replace(found, fault=f"it was committed after generation {newer} of the run began before it")


def _numbers(metrics: Any) -> dict[str, float]:
    """Metrics that can be compared; the state of a checkpoint that was not a run's may hold anything."""
    found = metrics.items() if isinstance(metrics, dict) else ()
    return {name: float(value) for name, value in found if isinstance(value, int | float)}


def _compared(found: Committed, objects: _Objects) -> Committed:
    """The same, with the first file that is not there as it should be as its fault."""
    sizes = {there.key: there.bytes for there in objects.values()}
    wrong = [key for key, num_bytes in found.files.items() if sizes.get(key) != num_bytes]
    if found.fault is not None or not wrong:
        return found
    state = "is missing" if wrong[0] not in sizes else "has the wrong size"
    return replace(found, fault=f"{wrong[0].removeprefix(found.folder + '/')} {state}")


def _orphans(folder: str, objects: _Objects, committed_attempt: str | None, now: float) -> Iterator[Orphan]:
    attempts: dict[str, list[StoredObject]] = defaultdict(list)
    for below, found in objects.items():
        attempt, _, name = below.partition("/")
        if name and _ATTEMPT.fullmatch(attempt) and attempt != committed_attempt:
            attempts[attempt].append(found)
    for attempt, files in sorted(attempts.items()):
        keys = tuple(file.key for file in files)
        age_s = now - max(file.modified for file in files)
        yield Orphan(folder, attempt, keys, sum(file.bytes for file in files), age_s)

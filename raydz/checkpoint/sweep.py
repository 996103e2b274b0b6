"""Deleting what rules and age allow: manifest first, then data, so that nothing half deleted can be loaded.

Neighbours: `stock.py` says what is there, `retention.py` what is surplus; `train/keeping.py` sweeps after each commit,
`raydz checkpoint gc` by hand. See the note "Retention" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial

from raydz.checkpoint.find import join_key
from raydz.checkpoint.manifest import MANIFEST_NAME
from raydz.checkpoint.retention import Rules, surplus
from raydz.checkpoint.stock import Committed, Orphan, StockTaker
from raydz.errors import StorageError
from raydz.storage import Store


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep would delete, and what it found that it leaves."""

    surplus: tuple[Committed, ...]
    orphans: tuple[Orphan, ...]
    damaged: tuple[Committed, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Of what would be deleted."""
        return sum(found.num_bytes for found in self.surplus) + sum(orphan.num_bytes for orphan in self.orphans)


@dataclass
class Swept:
    """What was deleted: folders of checkpoints, `folder/attempt` of orphans, leftovers of killed writers.

    Attributes:
        faults: what could not be deleted, and why; a later sweep tries again.
    """

    checkpoints: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    num_leftovers: int = 0
    num_bytes: int = 0
    faults: list[str] = field(default_factory=list)

    @property
    def is_nothing(self) -> bool:
        """Whether there was nothing to do."""
        return not (self.checkpoints or self.orphans or self.num_leftovers or self.faults)


class Sweeper:
    """Sweeps one folder of checkpoints, as often as wanted.

    Args:
        reads_all: False spares manifests that are not needed; then damaged checkpoints are not looked for.
        in_use: says which folders something loads from or saves to; asked again right before each deletion.
        sweep_after_s: age from which files without a manifest are deleted; None: never.
    """

    def __init__(
        self,
        store: Store,
        rules: Rules,
        *,
        folder: str = "",
        sweep_after_s: float | None = None,
        in_use: Callable[[], Collection[str]] = frozenset,
        reads_all: bool = True,
    ) -> None:
        self._store, self._rules, self._sweep_after_s = store, rules, sweep_after_s
        self._in_use = in_use
        self._stock = StockTaker(store, folder, reads_all=reads_all or rules.last is not None)

    def plan(self) -> SweepPlan:
        """What `run` would delete now. Raises: StorageError."""
        stock = self._stock.take()
        in_use = {found.step for found in stock.committed if self._is_used(found.folder)}
        steps = set(surplus(stock.whole, self._rules, in_use))
        chosen = tuple(found for found in stock.committed if found.step in steps and found.fault is None)
        limit_s = self._sweep_after_s
        old = () if limit_s is None else (orphan for orphan in stock.orphans if orphan.age_s >= limit_s)
        orphans = tuple(orphan for orphan in old if not self._is_used(orphan.folder))
        return SweepPlan(chosen, orphans, tuple(stock.damaged))

    def run(self, plan: SweepPlan | None = None) -> Swept:
        """Delete what is planned, and what killed writers left. One thing that cannot be deleted keeps no other.

        Raises:
            StorageError: the folder cannot even be listed.
        """
        plan = plan or self.plan()
        done = Swept()
        for checkpoint in plan.surplus:
            if self._is_used(checkpoint.folder):
                continue
            if _tried(done, checkpoint.folder, partial(self._delete, checkpoint)):
                done.checkpoints.append(checkpoint.folder)
                done.num_bytes += checkpoint.num_bytes
        for orphan in plan.orphans:
            name = join_key(orphan.folder, orphan.attempt)
            if _tried(done, name, partial(self._delete_orphan, orphan)):
                done.orphans.append(name)
                done.num_bytes += orphan.num_bytes
        if self._sweep_after_s is not None:
            _tried(done, self._store.uri, partial(self._sweep_leftovers, done))
        return done

    def _is_used(self, folder: str) -> bool:
        return folder in self._in_use()

    def _delete(self, checkpoint: Committed) -> bool:
        """From the first line on the checkpoint is none; data that stay are an orphan, which ages."""
        self._store.delete([join_key(checkpoint.folder, MANIFEST_NAME)])
        self._store.delete(checkpoint.files)
        return True

    def _delete_orphan(self, orphan: Orphan) -> bool:
        """Unless it was committed while we looked."""
        key = join_key(orphan.folder, MANIFEST_NAME)
        if self._store.exists(key) and orphan.attempt.encode() in self._store.get(key):
            return False
        self._store.delete(orphan.keys)
        return True

    def _sweep_leftovers(self, done: Swept) -> bool:
        assert self._sweep_after_s is not None, "asked for"
        done.num_leftovers = self._store.sweep(self._sweep_after_s)
        return True


def _tried(done: Swept, name: str, work: Callable[[], bool]) -> bool:
    try:
        return work()
    except StorageError as error:
        done.faults.append(f"{name}: {error.what}" + (f" ({error.got})" if error.got else ""))
        return False

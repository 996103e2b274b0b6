"""Word between ranks about a save, through the job's store: never a collective, so it may come at any time.

Neighbours: `background.py` makes one a engine; `writer.py` decides on rank 0 what the receipts come to. Threads that
save may not use the process groups training uses: their order would depend on the disk. See "Receipts" in README.md.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from raydz.checkpoint.garbage import collection_paused
from raydz.errors import CheckpointError

_PART_BYTES = 1 << 20
_POLL_S = (0.005, 0.25)
_ACKNOWLEDGED_S = 30.0
_GRACE_S = 30.0
"""How much longer than rank 0 the others wait: it is the one that says what became of a save."""

Decide = Callable[[list[dict[str, Any]]], dict[str, Any]]


class ReceiptExchange:
    """The saves of one engine, by number.

    Args:
        store: the job's; None in a world of one.
        prefix: of its keys, the same on all ranks and of no other engine.
    """

    def __init__(self, store: dist.Store | None, prefix: str, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        if world_size > 1 and store is None:
            raise CheckpointError(
                "ranks cannot tell each other of a save in the background", got="a process group without a store",
                remedy="save with async_save=False",
            )  # fmt: skip
        self._shared: dist.Store | None = None
        if store is not None:  # a connection of its own: it must not wait for what other threads ask
            self._shared = dist.PrefixStore(prefix, store.clone() if hasattr(store, "clone") else store)

    @property
    def _store(self) -> dist.Store:
        assert self._shared is not None, "a world of one asks nobody"
        return self._shared

    def agree_on(self, number: int, proposal: str, timeout_s: float) -> str:
        """Rank 0's proposal on every rank. Blocking: until rank 0 has made it.

        Raises:
            CheckpointError: it did not within the time, or its store is gone.
        """
        if self._shared is None:
            return proposal
        with _store_errors():
            if self.rank == 0:
                self._store.set(f"{number}/attempt", proposal)
                return proposal
            self._await([f"{number}/attempt"], timeout_s)
            return self._store.get(f"{number}/attempt").decode()

    def settle(self, number: int, receipt: dict[str, Any], decide: Decide, timeout_s: float) -> dict[str, Any]:
        """Hand this rank's receipt in, and learn what rank 0 makes of all of them, on every rank the same.

        Blocking: for at most `timeout_s` for the other ranks' receipts, and the time `decide` takes.

        Args:
            decide: runs on rank 0 alone; what it raises is told to all.

        Raises:
            CheckpointError: rank 0 said nothing within the time, or its store is gone: nobody here knows the outcome.
        """
        if self._shared is None:
            return _attempt(decide, [receipt])
        with _store_errors():
            if self.rank != 0:
                self._put(f"{number}/{self.rank}", receipt)
                self._await([f"{number}/outcome"], timeout_s + _GRACE_S)
                outcome = self._take(f"{number}/outcome")
                self._store.add(f"{number}/known", 1)
                return outcome
            keys = [f"{number}/{rank}" for rank in range(1, self.world_size)]
            missing = self._missing_after(keys, timeout_s)
            if missing:
                ranks = ", ".join(key.rpartition("/")[2] for key in missing)
                outcome = {"error": f"no word from rank {ranks} within {timeout_s:g} s", "keeps_files": False}
            else:
                outcome = _attempt(decide, [receipt, *map(self._take, keys)])
            self._put(f"{number}/outcome", outcome)
            if self._all_know(number, self.world_size - 1 - len(missing)) and not missing:
                self._forget(number, keys)
            return outcome

    def _all_know(self, number: int, num_ranks: int) -> bool:
        """Wait until so many ranks have read the outcome: this process may be the store's, and end now."""
        deadline = time.monotonic() + _ACKNOWLEDGED_S
        while self._store.add(f"{number}/known", 0) < num_ranks:
            if time.monotonic() > deadline:
                return False
            time.sleep(4 * _POLL_S[0])
        return True

    def _forget(self, number: int, receipts: list[str]) -> None:
        names = [f"{number}/attempt", f"{number}/known"]
        for key in (f"{number}/outcome", *receipts):
            names += [key, *(f"{key}.{part}" for part in range(int(self._store.get(key))))]
        for name in names:
            self._store.delete_key(name)

    def _put(self, key: str, value: dict[str, Any]) -> None:
        """Write a value, however long (the store takes 8 MiB at once); the key itself is set last."""
        data = zlib.compress(json.dumps(value).encode(), 1)
        parts = [data[start : start + _PART_BYTES] for start in range(0, len(data), _PART_BYTES)]
        for index, part in enumerate(parts):
            self._store.set(f"{key}.{index}", part)  # type: ignore[arg-type]  # bytes are taken, too
        self._store.set(key, str(len(parts)))

    def _take(self, key: str) -> dict[str, Any]:
        parts = [self._store.get(f"{key}.{index}") for index in range(int(self._store.get(key)))]
        with collection_paused():
            return json.loads(zlib.decompress(b"".join(parts)))

    def _await(self, keys: list[str], timeout_s: float) -> None:
        if self._missing_after(keys, timeout_s):
            raise CheckpointError(
                "rank 0 did not say what became of a save", got=f"nothing within {timeout_s:g} s",
                remedy="the log of rank 0 says why; checkpoint.timeout_s is the limit",
            )  # fmt: skip

    def _missing_after(self, keys: list[str], timeout_s: float) -> list[str]:
        """Those of the keys that are not there within the time."""
        deadline, pause_s = time.monotonic() + timeout_s, _POLL_S[0]
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                return [key for key in keys if not self._store.check([key])]
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_S[1])
        return []


def _attempt(decide: Decide, receipts: list[dict[str, Any]]) -> dict[str, Any]:
    try:
        return decide(receipts)
    except Exception as error:  # the other ranks wait for an answer, whatever went wrong
        return {"error": f"{type(error).__name__}: {error}".replace("\n", " ")}


@contextmanager
def _store_errors() -> Iterator[None]:
    """Name what is wrong when the process that holds the store has ended."""
    try:
        yield
    except RuntimeError as error:
        raise CheckpointError(
            "the outcome of a save is not known: the store of the job is gone",
            got=str(error).strip().splitlines()[0],
            remedy="the process that held it (rank 0, or the launcher) says why",
        ) from None

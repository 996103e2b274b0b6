"""The half of an engine's checkpoints that saves: at once, or behind training's back.

Neighbours: `access.py` adds the half that loads; `writer.py` saves at once, `background.py` behind; `pieces.py` says
what a rank holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, overload

from raydz import log
from raydz.checkpoint.background import SAVE_TIMEOUT_S, AfterCommit, BackgroundSaves, SaveHandle
from raydz.checkpoint.exchange import ReceiptExchange
from raydz.checkpoint.find import checkpoint_uri, step_folder
from raydz.checkpoint.generations import Fence
from raydz.checkpoint.memory import MemorySnapshots
from raydz.checkpoint.pieces import StatePiece, state_pieces
from raydz.checkpoint.writer import SaveRequest, save
from raydz.dist import World
from raydz.dist.monitor import default_store
from raydz.errors import TrainingError
from raydz.optim.loss_scale import LossScale
from raydz.storage import S3Options, Store, open_store
from raydz.zero import Communicators, ShardedModel, ShardedOptimizer
from raydz.zero.average import ShardedAverage

COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "skipped_in_row")
_save_numbers = itertools.count()  # of engines that save in the background: the same on every rank
_logger = log.get(__name__)


class SaveAccess:
    """The engine has the attributes."""

    sharded: ShardedModel
    optimizer: ShardedOptimizer
    comms: Communicators
    world: World
    average: ShardedAverage | None
    loss_scale: LossScale | None
    global_steps: int
    _within_step: int
    fence: Fence | None = None
    """Of the run that this engine trains, on rank 0."""
    _saves: BackgroundSaves | None = None
    _snapshots: MemorySnapshots | None = None

    def settle(self) -> None:
        """Await everything outstanding: afterwards no transfer touches the engine's buffers. Collective."""
        self.before_change()
        self.optimizer.finish()
        self.sharded.release_all()

    def before_change(self) -> None:
        """Wait until what a save in the background, or a gather, copies from host memory may change. Not collective.

        The engine calls this before it changes weights or states. Whoever writes to them past the engine, between a
        save and the next step, calls it first.
        """
        if self.sharded.offload is not None:
            self.sharded.offload.synchronise()
        if self._saves is not None:
            self._saves.finish_snapshot()
        if self._snapshots is not None:
            self._snapshots.finish_copy()

    @overload
    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None, *,
        options: S3Options | None = None, async_save: Literal[False] = False,
    ) -> str: ...  # fmt: skip

    @overload
    def save_checkpoint(
        self, save_dir: str | Path, tag: str | None = None, client_state: Mapping[str, Any] | None = None, *,
        options: S3Options | None = None, async_save: Literal[True],
    ) -> SaveHandle: ...  # fmt: skip

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        options: S3Options | None = None,
        async_save: bool = False,
    ) -> str | SaveHandle:
        """Save everything that training needs to go on, and commit it.

        Args:
            save_dir: folder or `s3://bucket/prefix`.
            tag: name of the checkpoint's folder; None is `step-<committed steps>`.
            client_state: JSON-serialisable, comes back from `load_checkpoint`.
            async_save: return at once and do all of it in a thread; see `save_async`.

        Returns:
            The checkpoint's URI, or with `async_save` the handle whose `result()` waits for it.

        Collective: every rank, between steps. Blocking: until it is committed; with `async_save` while the save before
        is under way. Memory: with `async_save` host memory for this rank's state, kept for the next save.

        Raises:
            CheckpointError: on every rank, if any could not write; no earlier checkpoint is touched. With
                `async_save` it comes from the handle.
        """
        store = open_store(str(save_dir), options)
        folder = tag or step_folder(self.global_steps)
        state = {"client": dict(client_state or {})}
        if async_save:
            return self.save_async(store, folder, step=self.global_steps, state=state)
        self.save_to(store, folder, step=self.global_steps, state=state)
        return checkpoint_uri(store, folder)

    def save_to(self, store: Store, folder: str, *, step: int, state: Mapping[str, Any]) -> int:
        """`save_checkpoint` into an open store, with the caller's own step number and state; returns its bytes."""
        self.await_save()
        return save(self._request(store, folder, step, state), self.comms.world)

    def save_async(
        self,
        store: Store,
        folder: str,
        *,
        step: int,
        state: Mapping[str, Any],
        timeout_s: float = SAVE_TIMEOUT_S,
        after_commit: AfterCommit | None = None,
    ) -> SaveHandle:
        """Save the state as it is now while training goes on.

        Copying runs behind the next forward and backward; the next update waits for it. Writing, receipts and commit
        follow in the same thread. A script that ends without `settle_saves`, `destroy` or the handle's `result` loses
        what is in flight; the checkpoint before it is then the newest.

        Args:
            timeout_s: how long ranks wait for each other's part before the save has failed.
            after_commit: runs on rank 0, in the save's thread, with the folder; what it raises is only logged.

        Collective: every rank, between steps. Blocking: while the save before is under way.

        Raises:
            TrainingError: micro-batches of a step have run. CheckpointError: the save before does not end.
        """
        request = self._request(store, folder, step, state)
        if self._saves is None:
            shared = default_store() if self.world.world_size > 1 else None
            prefix = f"raydz/saves/{next(_save_numbers)}"
            exchange = ReceiptExchange(shared, prefix, self.world.rank, self.world.world_size)
            self._saves = BackgroundSaves(exchange, self.world.device)
        return self._saves.begin(request, timeout_s=timeout_s, after_commit=after_commit)

    def snapshot(self, snapshots: MemorySnapshots, *, step: int, state: Mapping[str, Any]) -> None:
        """Keep the state as it is now in memory, while training goes on; `CheckpointAccess.restore` takes it back.

        Collective: every rank, between steps. Blocking: while the snapshot before is under way.
        """
        self._refuse_within_step()
        self.settle()
        self._snapshots = snapshots
        snapshots.begin(step, self.held_pieces(), {**state, "engine": self._counters()})

    def held_pieces(self) -> list[StatePiece]:
        """All that this rank holds, whoever else does."""
        return state_pieces(self.sharded, self.optimizer, saving=False, average=self.average)

    def settle_saves(self, timeout_s: float | None = None) -> None:
        """Wait for the save in flight, if there is one. Not collective; every rank gets the same answer.

        Raises:
            CheckpointError: it failed, or has not ended within `timeout_s`.
        """
        handle = None if self._saves is None else self._saves.in_flight
        if handle is not None:
            handle.result(timeout_s)

    def await_save(self) -> None:
        """Wait for the end of the save in flight, good or bad. Not collective."""
        if self._saves is not None and self._saves.in_flight is not None:
            self._saves.in_flight.wait()

    def take_save_blocked_s(self) -> float:
        """How long training has stood still for saves in the background, and in memory, since the last call."""
        saves_s = 0.0 if self._saves is None else self._saves.take_blocked_s()
        return saves_s + (0.0 if self._snapshots is None else self._snapshots.take_blocked_s())

    def close_saves(self, timeout_s: float | None = None) -> None:
        """Let the save in flight end, within `timeout_s`, and give the host memory back; never raises for the save."""
        if self._saves is None:
            return
        handle = self._saves.in_flight
        if not self._saves.close(timeout_s):
            _logger.warning("a save is given up after %g s: %s", timeout_s, handle and handle.uri)
        elif handle is not None and handle.error is not None:
            _logger.error("%s", handle.error)

    def _request(self, store: Store, folder: str, step: int, state: Mapping[str, Any]) -> SaveRequest:
        self._refuse_within_step()
        self.settle()
        aliases = {alias: spec.name for group in self.sharded.groups for spec in group.specs for alias in spec.aliases}
        pieces = state_pieces(self.sharded, self.optimizer, saving=True, average=self.average)
        return SaveRequest(store, folder, step, pieces, aliases, {**state, "engine": self._counters()}, self.fence)

    def _counters(self) -> dict[str, Any]:
        counters: dict[str, Any] = {name: getattr(self, name) for name in COUNTERS}
        if self.loss_scale is not None:
            counters["loss_scale"] = self.loss_scale.to_state()
        return counters

    def _refuse_within_step(self) -> None:
        if self._within_step:
            raise TrainingError(
                "a checkpoint within accumulation would lose gradients", got=f"{self._within_step} micro-batches done",
                wanted="a call right after an optimizer step",
            )  # fmt: skip

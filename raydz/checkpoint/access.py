"""Saving and loading of an engine: its pieces, its counters, and the newest checkpoint of a folder.

Neighbours: `engine.py` inherits `CheckpointAccess`; `pieces.py` says what a rank holds, `writer.py` and `reader.py`
move it, `find.py` picks the folder.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydz import log
from raydz.checkpoint.find import checkpoint_uri, open_checkpoint, step_folder
from raydz.checkpoint.manifest import Manifest
from raydz.checkpoint.pieces import state_pieces
from raydz.checkpoint.reader import load_pieces
from raydz.checkpoint.writer import SaveRequest, save
from raydz.dist.agreement import on_every_rank, on_rank_zero
from raydz.errors import TrainingError
from raydz.optim.loss_scale import LossScale
from raydz.storage import S3Options, Store, open_store
from raydz.zero import Communicators, ShardedModel, ShardedOptimizer
from raydz.zero.average import KIND, ShardedAverage

_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "skipped_in_row")
_logger = log.get(__name__)


class CheckpointAccess:
    """The part of the engine that saves and loads; the engine has the attributes."""

    sharded: ShardedModel
    optimizer: ShardedOptimizer
    comms: Communicators
    average: ShardedAverage | None
    loss_scale: LossScale | None
    global_steps: int
    _within_step: int

    def settle(self) -> None:
        """Await everything outstanding: afterwards no transfer touches the engine's buffers. Collective."""
        self.sharded.release_all()

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        options: S3Options | None = None,
    ) -> str:
        """Save everything that training needs to go on, and commit it; returns the checkpoint's URI.

        Args:
            save_dir: folder or `s3://bucket/prefix`.
            tag: name of the checkpoint's folder; None is `step-<committed steps>`.
            client_state: JSON-serialisable, comes back from `load_checkpoint`.

        Collective and blocking: every rank, between steps.

        Raises:
            CheckpointError: on every rank, if any could not write; no earlier checkpoint is touched.
        """
        store = open_store(str(save_dir), options)
        folder = tag or step_folder(self.global_steps)
        self.save_to(store, folder, step=self.global_steps, state={"client": dict(client_state or {})})
        return checkpoint_uri(store, folder)

    def save_to(self, store: Store, folder: str, *, step: int, state: Mapping[str, Any]) -> None:
        """`save_checkpoint` into an open store, with the caller's own step number and state."""
        if self._within_step:
            raise TrainingError(
                "a checkpoint within accumulation would lose gradients", got=f"{self._within_step} micro-batches done",
                wanted="a call right after an optimizer step",
            )  # fmt: skip
        self.settle()
        counters: dict[str, Any] = {name: getattr(self, name) for name in _COUNTERS}
        if self.loss_scale is not None:
            counters["loss_scale"] = self.loss_scale.to_state()
        aliases = {alias: spec.name for group in self.sharded.groups for spec in group.specs for alias in spec.aliases}
        pieces = state_pieces(self.sharded, self.optimizer, saving=True, average=self.average)
        save(SaveRequest(store, folder, step, pieces, aliases, {**state, "engine": counters}), self.comms.world)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *, options: S3Options | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Load masters, optimizer states and counters, whatever stage and world size saved them.

        Args:
            load_dir: a checkpoint, or a folder whose newest committed one is taken.
            tag: exactly this checkpoint of the folder.

        Returns:
            The URI of the checkpoint and the `client_state` it was saved with.

        Collective and blocking: every rank.

        Raises:
            CheckpointError: on every rank: there is none, or it does not fit the model, and the engine is as before;
                or it is damaged, and the engine must not be used before another load.
        """
        store = open_store(str(load_dir), options)
        comm = self.comms.world
        folder = on_rank_zero(comm, lambda: open_checkpoint(store, tag or "")[0])  # "newest" may change meanwhile
        manifest = on_every_rank(comm, lambda: open_checkpoint(store, folder)[1])
        on_every_rank(comm, lambda: self.load_from(store, folder, manifest))
        return checkpoint_uri(store, folder), dict(manifest.state.get("client", {}))

    def load_from(self, store: Store, folder: str, manifest: Manifest) -> int:
        """Load an opened checkpoint; returns the bytes this rank read. Nothing in it is collective."""
        self.settle()
        has_average = self.average is not None and any(kind == KIND for _, kind in manifest.tensors)
        average = self.average if has_average else None
        pieces = state_pieces(self.sharded, self.optimizer, saving=False, average=average)
        num_bytes = load_pieces(store, folder, manifest, pieces)
        if self.average is not None and not has_average:
            _logger.warning("%s has no average of the weights: it begins at the loaded ones", folder or store.uri)
            self.average.restart()
        for group in self.sharded.groups:
            group.mark_updated()
        self.optimizer.clear_gradients()  # of a step that had begun
        self._within_step = 0
        for name in _COUNTERS:
            setattr(self, name, manifest.state["engine"][name])
        stored = manifest.state["engine"].get("loss_scale")  # absent where another dtype trained before
        if self.loss_scale is not None and stored:
            self.loss_scale = self.loss_scale.from_state(stored)
        return num_bytes

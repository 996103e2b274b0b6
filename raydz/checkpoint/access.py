"""Saving and loading of an engine: its pieces, its counters, and the newest checkpoint of a folder.

Neighbours: `engine.py` inherits `CheckpointAccess`; `pieces.py` says what a rank holds, `writer.py` and `load.py`
move it, `find.py` picks the folder.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from raydz import log
from raydz.checkpoint.find import checkpoint_uri, open_together
from raydz.checkpoint.key_map import KeyMap
from raydz.checkpoint.load import LoadReport, LoadRequest, load_pieces, log_report
from raydz.checkpoint.manifest import Manifest
from raydz.checkpoint.memory import MemorySnapshots, Moment
from raydz.checkpoint.pieces import state_pieces
from raydz.checkpoint.saving import COUNTERS, SaveAccess
from raydz.storage import S3Options, Store, open_store
from raydz.zero.average import KIND

_logger = log.get(__name__)


class CheckpointAccess(SaveAccess):
    """The part of the engine that saves and loads; the engine has the attributes."""

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        *,
        options: S3Options | None = None,
        weights_only: bool = False,
        only: Sequence[str] = (),
        missing: Literal["error", "keep"] = "error",
        key_map: KeyMap | Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[str, Any]]:
        """Load masters, optimizer states and counters, whatever stage and world size saved them.

        Args:
            load_dir: a checkpoint, or a folder whose newest committed one is taken.
            tag: exactly this checkpoint of the folder.
            weights_only, only, missing, key_map: see `LoadRequest`; a mapping is read by `KeyMap.of`.

        Returns:
            The URI of the checkpoint and the `client_state` it was saved with. `load_report` says what matched.

        Collective and blocking: every rank.

        Raises:
            CheckpointError: on every rank: there is none, or it does not fit the model, and the engine is as before;
                or it is damaged, and the engine must not be used before another load.
        """
        renames = None if key_map is None else KeyMap.of(key_map)
        names = only if isinstance(only, str) else tuple(only)
        request = LoadRequest(weights_only, names, missing, renames)  # type: ignore[arg-type]
        self.await_save()
        store = open_store(str(load_dir), options)
        folder, manifest = open_together(self.comms.world, store, tag or "")
        self.load_from(store, folder, manifest, request)
        return checkpoint_uri(store, folder), dict(manifest.state.get("client", {}))

    def load_from(
        self, store: Store, folder: str, manifest: Manifest, request: LoadRequest | None = None
    ) -> LoadReport:
        """Load an opened checkpoint. Collective and blocking: every rank. Raises: see `load_checkpoint`."""
        self.settle()
        request = request or LoadRequest()
        is_averaging = self.average is not None
        has_average = is_averaging and not request.weights_only and any(kind == KIND for _, kind in manifest.tensors)
        average = self.average if has_average else None
        pieces = state_pieces(self.sharded, self.optimizer, saving=False, average=average)
        self.load_report = load_pieces(store, folder, manifest, pieces, request, self.comms)
        log_report(self.load_report, checkpoint_uri(store, folder), self.comms.world.rank)
        if self.average is not None and not has_average:
            _logger.warning("no average of the weights was loaded from %s: it begins at them", folder or store.uri)
            self.average.restart()
        self._mark_loaded()
        if not request.is_partial:
            self._take_counters(manifest.state)
        return self.load_report

    def restore(self, snapshots: MemorySnapshots, moment: Moment) -> dict[str, Any]:
        """Take back a snapshot of `snapshot`; returns its `state`. Blocking.

        Collective: every rank, with the same moment, which all have (`MemorySnapshots.usable`).
        """
        self.settle()
        state = snapshots.load(moment, self.held_pieces())
        self._mark_loaded()
        self._take_counters(state)
        return state

    def _mark_loaded(self) -> None:
        for group in self.sharded.groups:
            group.mark_updated()
        self.optimizer.clear_gradients()  # of a step that had begun
        self._within_step = 0

    def _take_counters(self, state: Mapping[str, Any]) -> None:
        for name in COUNTERS:
            setattr(self, name, state["engine"][name])
        stored = state["engine"].get("loss_scale")  # absent where another dtype trained before
        if self.loss_scale is not None and stored:
            self.loss_scale = self.loss_scale.from_state(stored)

"""Hugging Face exports beside training: one thread of rank 0 that merges committed checkpoints, one after the other.

Neighbours: `train/exports.py` starts one and hands it what was committed; `checkpoint_source.py` reads, `export.py`
writes. Nothing of the engine is touched, so no rank holds more than its share and training waits for nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any

import torch

from raydz import log
from raydz.checkpoint import open_checkpoint
from raydz.checkpoint.find import join_key
from raydz.errors import CheckpointError, RaydzError
from raydz.exits import end_before_exit
from raydz.hf.checkpoint_source import open_checkpoint_source
from raydz.hf.export import SHARD_BYTES, Export, export_folder
from raydz.hf.folder import INDEX, SINGLE
from raydz.storage import Store

_logger = log.get(__name__)


@dataclass(frozen=True)
class ExportRequest:
    """What every export of a run has in common.

    Args:
        checkpoints: the store that holds folders of checkpoints.
        exports: where each export gets a folder of the checkpoint's name.
        config_json, dtype, shard_bytes, others: see `export_folder`.
    """

    checkpoints: Store
    exports: Store
    config_json: Mapping[str, Any] | None = None
    dtype: torch.dtype | None = None
    shard_bytes: int = SHARD_BYTES
    others: Mapping[str, bytes] = field(default_factory=dict)

    def is_done(self, folder: str) -> bool:
        """Whether a whole export of this checkpoint is there."""
        return any(self.exports.exists(join_key(folder, key)) for key in (INDEX, SINGLE))


@dataclass(frozen=True)
class Outcome:
    """How an export ended: `export` or `error` is None. `failures` are those of the run up to then."""

    folder: str
    seconds: float
    export: Export | None
    error: str | None
    failures: int


class BackgroundExports:
    """A queue of checkpoints to export. A failure is logged, counted and ends nothing.

    Attributes:
        failures: exports so far that failed.
    """

    def __init__(self, request: ExportRequest) -> None:
        self._request = request
        self._waiting: SimpleQueue[str | None] = SimpleQueue()
        self._ended: SimpleQueue[Outcome] = SimpleQueue()
        self._stopped = threading.Event()
        self._open: set[str] = set()
        self._lock = threading.Lock()
        self.failures = 0
        self._thread = threading.Thread(target=self._work, name="raydz-export", daemon=True)
        self._thread.start()
        end_before_exit(self.stop)

    def add(self, folder: str) -> None:
        """Export a committed checkpoint when those before it are done. Safe to call from any thread."""
        with self._lock:
            self._open.add(folder)
        self._waiting.put(folder)

    def in_use(self) -> frozenset[str]:
        """Folders of checkpoints that are being read or will be: not to be removed."""
        with self._lock:
            return frozenset(self._open)

    def outcomes(self) -> list[Outcome]:
        """What has ended since the last call."""
        found = []
        while not self._ended.empty():
            found.append(self._ended.get())
        return found

    def finish(self) -> None:
        """Wait until everything added is exported or has failed, and end the thread. Blocking."""
        self._waiting.put(None)
        self._thread.join()

    def stop(self, wait_s: float = 10.0) -> None:
        """Give up what is not done: an export in the middle leaves no index. Blocking: `wait_s` at most."""
        self._stopped.set()
        self._waiting.put(None)
        self._thread.join(wait_s)

    def _work(self) -> None:
        while (folder := self._waiting.get()) is not None and not self._stopped.is_set():
            started = time.perf_counter()
            export, error = None, None
            try:
                export = self._export(folder)
            except _Stopped:
                error = "given up: the run has ended"
            except (RaydzError, OSError) as failure:
                error = str(failure)
            except Exception as failure:  # a fault of raydz must not pass for a missing export
                error = f"{type(failure).__name__}: {failure}"
            if error is not None:
                self.failures += 1
                _logger.warning("no export of checkpoint %s (%d failed so far): %s", folder, self.failures, error)
            with self._lock:
                self._open.discard(folder)
            if export is not None or error is not None:
                self._ended.put(Outcome(folder, time.perf_counter() - started, export, error, self.failures))

    def _export(self, folder: str) -> Export | None:
        """None where it was done before, by an earlier attempt at the run."""
        request = self._request
        if request.is_done(folder):
            return None
        source = open_checkpoint_source(request.checkpoints, *open_checkpoint(request.checkpoints, folder))
        return export_folder(
            source, request.exports, folder, config_json=request.config_json, dtype=request.dtype,
            shard_bytes=request.shard_bytes, others=request.others, done=self._go_on,
        )  # fmt: skip

    def _go_on(self, num_bytes: int) -> None:
        if self._stopped.is_set():
            raise _Stopped("the run has ended")


class _Stopped(CheckpointError):
    """Ends an export between two tensors."""

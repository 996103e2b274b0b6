"""A run's Hugging Face exports: which checkpoints get one, and what became of it.

Neighbours: `loop.py` opens and ends it; `saving.py` calls its hook after each commit; `hf/background.py` does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from raydz import log
from raydz.checkpoint import step_folder
from raydz.config import Config
from raydz.dist.monitor import excused
from raydz.hf import BackgroundExports, ExportRequest, config_of_decoder
from raydz.models import Decoder
from raydz.storage import Store

if TYPE_CHECKING:
    from raydz.train.setup import Run

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_logger = log.get(__name__)


class RunExports:
    """The exports of one run, on rank 0."""

    def __init__(self, run: Run, target: Store) -> None:
        self._run = run
        tokenizer = run.prepared.tokenizer()
        self._exports = BackgroundExports(
            ExportRequest(
                checkpoints=run.store,
                exports=target,
                config_json=config_json(run.engine.module, run.config, tokenizer.eos_id),
                dtype=export_dtype(run),
                shard_bytes=run.config.checkpoint.export_shard_bytes,
                others={"tokenizer.json": tokenizer.json_text.encode()},
            )
        )
        if run.newest_folder is not None:  # where an earlier attempt was killed before its export was done
            self.committed(run.newest_folder)

    def committed(self, folder: str) -> None:
        """The hook: export a checkpoint if it is due. Returns at once, in whatever thread."""
        if is_due(folder, self._run.config):
            self._exports.add(folder)

    def steps_in_use(self) -> list[int]:
        """Of checkpoints that are being read or will be: not to be removed."""
        return [step_of(folder) for folder in self._exports.in_use()]

    def report(self) -> None:
        """Write what has ended since the last call to the run's events."""
        for ended in self._exports.outcomes():
            fields: dict[str, Any] = {"folder": ended.folder, "seconds": round(ended.seconds, 3)}
            if ended.export is None:
                self._log("export_failed", {**fields, "error": ended.error, "failures": ended.failures})
            else:
                self._log("export", {**fields, "uri": ended.export.uri, "bytes": ended.export.num_bytes})
                _logger.info("exported %s in %.2f s", ended.export.uri, ended.seconds)

    def finish(self) -> None:
        """At the run's end: wait for what was committed. Blocking."""
        with excused():
            self._exports.finish()
        self.report()

    def stop(self) -> None:
        """When the run fails: give up what is under way; the next attempt does it again."""
        self._exports.stop()
        self.report()

    def _log(self, event: str, fields: dict[str, Any]) -> None:
        if self._run.tracker:
            self._run.tracker.log_event(event, fields)


def open_exports(run: Run, target: Store) -> RunExports | None:
    """The exports that `checkpoint.export_every` asks for; None where it does not, and on other ranks."""
    if not run.config.checkpoint.export_every or run.engine.world.rank != 0:
        return None
    exports = RunExports(run, target)
    run.after_commit.append(exports.committed)
    return exports


def is_due(folder: str, config: Config) -> bool:
    """Every `export_every`-th save, counted by steps so that restarts count alike, and the last one."""
    period = config.checkpoint.every * config.checkpoint.export_every
    if folder == step_folder(config.train.steps):
        return True
    return period > 0 and step_of(folder) % period == 0


def step_of(folder: str) -> int:
    """The step of a checkpoint's folder."""
    return int(folder.rpartition("-")[2])


def export_dtype(run: Run) -> torch.dtype:
    """`checkpoint.export_dtype`; auto is what the run computes in."""
    wanted = run.config.checkpoint.export_dtype
    return run.engine.sharded.precision.compute_dtype if wanted == "auto" else _DTYPES[wanted]


def config_json(module: nn.Module, config: Config, eos_id: int) -> dict[str, Any] | None:
    """Of raydz's decoder or of a model of transformers; None of any other."""
    if isinstance(module, Decoder):
        positions = config.model.max_position_embeddings
        length = config.data.sequence_length if positions == "auto" else positions
        return config_of_decoder(module.shape, length) | {"eos_token_id": eos_id}
    own: Any = getattr(module, "config", None)
    return own.to_dict() if hasattr(own, "to_dict") else None

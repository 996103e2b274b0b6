"""Where a run starts: its newest checkpoint, a named one, or the beginning; never over in silence.

Neighbours: `setup.py` calls `choose_start` on rank 0 before the engine loads anything.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydz.checkpoint import KeyMap, Manifest, committed_steps, open_checkpoint, open_together
from raydz.config import Config
from raydz.dist import Communicator
from raydz.errors import ConfigError
from raydz.storage import S3Options, Store, open_store


@dataclass(frozen=True)
class Start:
    """Checkpoint to load: its store, folder and step; or the beginning, where there is none.

    `source` is the URI that `resume` named, kept in every later checkpoint of the run, so that a restart of the same
    job knows that the run's own checkpoints continue it.
    """

    store_uri: str
    folder: str
    step: int
    source: str | None = None
    key_map: dict[str, dict[str, str]] | None = None
    """Of `resume_key_map`, as `KeyMap.of` takes it; the run's own checkpoints have the model's names already."""

    @property
    def is_beginning(self) -> bool:
        """Whether there is nothing to load. (A named checkpoint's folder is empty when the store is the checkpoint.)"""
        return not self.folder and self.source is None


def choose_start(config: Config, own: Store, options: S3Options) -> Start:
    """Decide from `resume` and what the run's own folder holds.

    Raises:
        ConfigError: the run has checkpoints that `resume` would start over or leave behind.
        CheckpointError: the named checkpoint is not there or is damaged.
    """
    if config.resume_key_map and config.resume in ("auto", "never"):
        raise ConfigError(
            "a key map without the checkpoint it is for", where="resume_key_map", got=f"resume: {config.resume}",
            wanted="resume: the URI of a checkpoint with other names",
        )  # fmt: skip
    steps = committed_steps(own)
    if config.resume == "never":
        if steps:
            raise _occupied(config, own, steps[-1])
        return Start(own.uri, "", 0)
    if config.resume == "auto":
        return _newest(own) if steps else Start(own.uri, "", 0)
    named = open_store(config.resume, options)
    folder, manifest = open_checkpoint(named)
    if steps:
        newest = _newest(own)
        is_same = named.uri.rstrip("/") + (f"/{folder}" if folder else "") == f"{own.uri.rstrip('/')}/{newest.folder}"
        if newest.source != config.resume and not is_same:
            raise _occupied(config, own, steps[-1])
        return newest
    key_map = KeyMap.from_file(config.resume_key_map).as_dict() if config.resume_key_map else None
    return Start(named.uri, folder, manifest.step, source=config.resume, key_map=key_map)


def _newest(own: Store) -> Start:
    folder, manifest = open_checkpoint(own)
    return Start(own.uri, folder, manifest.step, source=manifest.state.get("resumed_from"))


def load_manifest(start: Start, options: S3Options, comm: Communicator) -> tuple[Store, Manifest]:
    """The store and manifest of a start that has one. Collective: every rank; the manifest is read once."""
    store = open_store(start.store_uri, options)
    return store, open_together(comm, store, start.folder)[1]


def _occupied(config: Config, own: Store, newest_step: int) -> ConfigError:
    return ConfigError(
        f"run {config.run.name} has checkpoints that would be left behind",
        where="resume",
        got=f"{config.resume}; {own.uri} has step {newest_step}",
        wanted="auto, which continues them",
        remedy="set resume to auto, or give this run another run.name",
    )

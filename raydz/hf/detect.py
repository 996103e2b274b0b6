"""What kind of checkpoint lies at a place, by the files that are there.

Neighbours: `cli/convert.py` calls `open_source`; each layout is opened by its own module.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

from raydz.checkpoint import open_checkpoint
from raydz.checkpoint.find import find_checkpoint, join_key
from raydz.checkpoint.manifest import MANIFEST_NAME
from raydz.errors import CheckpointError
from raydz.hf.checkpoint_source import open_checkpoint_source
from raydz.hf.dcp import METADATA, open_dcp
from raydz.hf.deepspeed import is_zero_file, is_zero_folder, open_zero
from raydz.hf.folder import is_hf_folder, open_folder, open_single
from raydz.hf.remote import checkpoint_objects, kept_with, local_copy
from raydz.hf.source import BUFFER, WEIGHT, Source
from raydz.hf.universal import is_universal_file, is_universal_folder, open_universal
from raydz.storage import S3Options, Store, open_store

_LATEST = ("latest", "latest_universal")


def open_source(
    uri: str,
    options: S3Options | None = None,
    *,
    kind: str = WEIGHT,
    model_key: str | None = None,
    weights_only: bool = False,
    buffers: Sequence[str] = (),
    scratch: str | None = None,
) -> Source:
    """Open a checkpoint of raydz, DeepSpeed, DCP or Hugging Face; tensors are read when they are asked for.

    DeepSpeed's and DCP's on S3 are copied to this host first; the copy goes with the source.

    Args:
        kind: of a raydz checkpoint, what stands for its weights.
        model_key: see `open_dcp`.
        weights_only: leave optimizer states and counters out.
        buffers: globs of names that are buffers of their modules, where a layout does not tell them from parameters.
        scratch: folder for such a copy; None is the system's for temporary files.

    Raises:
        CheckpointError: nothing known is there, or it is damaged.
    """
    source = _open(uri, options, kind, partial(_open_torch, model_key=model_key, weights_only=weights_only), scratch)
    for pattern in buffers:
        _mark_buffers(source, pattern)
    if weights_only:
        source.tensors = source.model_tensors()
    return source.require_tensors()


def _open(
    uri: str, options: S3Options | None, kind: str, open_torch: Callable[[Path], Source | None], scratch: str | None
) -> Source:
    if uri.endswith(".safetensors"):
        key = uri.rpartition("/")[2]
        return open_single(open_store(uri[: -len(key)] or ".", options), key)
    store = open_store(uri, options)
    folder = _own_checkpoint(store)
    if folder is not None:
        return open_checkpoint_source(store, *open_checkpoint(store, folder), kind=kind)
    if is_hf_folder(store):
        return open_folder(store)
    if "://" in uri and not uri.startswith("file://"):
        objects = checkpoint_objects(store, METADATA, is_deepspeed_file)
        if objects:
            with local_copy(store, objects, scratch) as copy:
                copied = open_torch(copy)
                if copied is None:
                    raise _unknown(store, None)
                copied.uri = uri
                return kept_with(copied, copy)
        raise _unknown(store, None)
    found = open_torch(Path(store.uri.removeprefix("file://")))
    if found is None:
        raise _unknown(store, None)
    return found


def _open_torch(path: Path, *, model_key: str | None, weights_only: bool) -> Source | None:
    """What torch's own files in a folder are, or None."""
    if (path / METADATA).is_file():
        return open_dcp(path, model_key=model_key, weights_only=weights_only)
    tag = _deepspeed_folder(path)
    if tag is None:
        return None
    return open_universal(tag) if is_universal_folder(tag) else open_zero(tag)


def is_deepspeed_file(key: str) -> bool:
    """Whether a folder with this file in it is one of DeepSpeed's tags."""
    return is_zero_file(key) or is_universal_file(key)


def _mark_buffers(source: Source, pattern: str) -> None:
    named = {item.name for item in source.tensors if fnmatchcase(item.name, pattern)}
    if not named:
        raise CheckpointError("a pattern of buffers matches nothing", where=source.uri, got=pattern)
    kept = [item for item in source.tensors if item.name not in named]
    marked = {item.name: replace(item, kind=BUFFER) for item in source.tensors if item.name in named}
    source.tensors = kept + list(marked.values())


def _own_checkpoint(store: Store) -> str | None:
    if store.exists(MANIFEST_NAME):
        return ""
    return find_checkpoint(store) or find_checkpoint(store, "checkpoints")


def _deepspeed_folder(path: Path) -> Path | None:
    """The folder of a tag: this one, or what `latest` names."""
    candidates = [path] if path.is_dir() else []
    for name in _LATEST:
        if (path / name).is_file():
            tag = (path / name).read_text(errors="replace").strip()
            if tag and "/" not in tag and tag not in (".", ".."):
                candidates.append(path / tag)
    for candidate in candidates:
        if candidate.is_dir() and (is_universal_folder(candidate) or is_zero_folder(candidate)):
            return candidate
    return None


def _unknown(store: Store, remedy: str | None) -> CheckpointError:
    pickled = [key for key in ("pytorch_model.bin", "pytorch_model.bin.index.json") if store.exists(key)]
    if pickled:
        remedy = "save it again with save_pretrained, which writes safetensors; pickled weights are not read"
    return CheckpointError(
        "no checkpoint that raydz knows", where=store.uri, got=pickled[0] if pickled else None,
        wanted=f"raydz's {join_key('step-…', MANIFEST_NAME)}, DeepSpeed's latest or zero_pp_rank_*, DCP's {METADATA}, "
        "or Hugging Face's model.safetensors",
        remedy=remedy,
    )  # fmt: skip

"""`raydz convert`: from a checkpoint of DeepSpeed, DCP, Hugging Face or raydz to another form.

Neighbours: `main.py` registers it; `raydz.hf` does the work. What takes seconds to import is imported when it runs.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raydz.cli.arguments import Endpoint, Json
from raydz.cli.progress import Done, bytes_bar
from raydz.errors import ConfigError
from raydz.units import format_bytes, parse_bytes

if TYPE_CHECKING:
    from raydz.hf import Source
    from raydz.storage import S3Options

_FORMS = ("hf", "raydz", "single")
_RENAMES_SHOWN = 20
_DTYPES = ("keep", "float32", "bfloat16", "float16")


def convert(
    src: Annotated[str, typer.Argument(metavar="SRC", help="Folder, s3://bucket/prefix or .safetensors file.")],
    dst: Annotated[str, typer.Argument(metavar="DST", help="Where to write; for single a .safetensors file.")],
    to: Annotated[str, typer.Option("--to", help="hf, raydz or single.")],
    dtype: Annotated[str, typer.Option(help="Of the weights in hf and single: keep, float32, bfloat16, float16.")] = (
        "keep"
    ),
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Of a shard of hf at most.")] = "5GB",
    config: Annotated[str | None, typer.Option(metavar="FILE", help="config.json for hf, in place of a derived.")] = (
        None
    ),
    heads: Annotated[int | None, typer.Option(min=1, help="Attention heads, where SRC does not say.")] = None,
    kind: Annotated[str, typer.Option(help="Of a raydz checkpoint: weight, or ema for the average.")] = "weight",
    weights_only: Annotated[bool, typer.Option(help="Leave optimizer states and counters out.")] = False,
    model_key: Annotated[str | None, typer.Option(metavar="KEYS", help="Of DCP: where the model is, as a.b.")] = None,
    buffers: Annotated[list[str] | None, typer.Option(metavar="GLOB", help="Names that are buffers.")] = None,
    key_map: Annotated[str | None, typer.Option(metavar="FILE", help="JSON: names in SRC -> names in DST.")] = None,
    scratch: Annotated[str | None, typer.Option(metavar="DIR", help="For DeepSpeed's and DCP's files on S3.")] = None,
    endpoint_url: Endpoint = None,
    as_json: Json = False,
) -> None:
    """Convert a checkpoint; what SRC is, is found out. Nothing in it is executed, nothing at DST overwritten.

    Files of DeepSpeed and DCP on S3 are copied to --scratch first and removed after. --key-map has the form of a run's
    resume_key_map: {"exact": {"old": "new"}, "regex": {"^old": "new"}}, or plain pairs.

    For raydz DST is a folder of checkpoints, for Engine.load_checkpoint (weights_only=True where SRC has no optimizer
    states), or for model.init_from of a run. Memory: one tensor at a time.
    """
    if to not in _FORMS or dtype not in _DTYPES:
        option, got, known = ("--to", to, _FORMS) if to not in _FORMS else ("--dtype", dtype, _DTYPES)
        raise ConfigError("an unknown form", where=option, got=got, wanted=", ".join(known))
    if to == "raydz" and dtype != "keep":
        raise ConfigError("raydz keeps masters as they are", where="--dtype", got=dtype, wanted="keep")
    from raydz.checkpoint import KeyMap
    from raydz.hf import open_source, rename_source
    from raydz.storage import S3Options

    options = S3Options(endpoint_url=endpoint_url)
    names = None if key_map is None else KeyMap.from_file(key_map)
    source = open_source(
        src, options, kind=kind, model_key=model_key, weights_only=weights_only, buffers=tuple(buffers or ()),
        scratch=scratch,
    )  # fmt: skip
    if not as_json:
        print(f"{source.what}, step {source.step}: {len(source.tensors)} tensors")
    renames = None if names is None else rename_source(source, names)
    wanted = source.tensors if to == "raydz" else source.model_tensors()
    with bytes_bar(sum(item.num_bytes for item in wanted)) as done:
        found = _WRITERS[to](source, dst, options, done, _Form(dtype, shard_size, config, heads))
    if renames is not None:
        found |= {"renamed": renames.renamed, "unused_rules": renames.idle}
    _print(source, found, as_json)


class _Form:
    """The options that say how an export looks."""

    def __init__(self, dtype: str, shard_size: str, config: str | None, heads: int | None) -> None:
        self.dtype_name, self.shard_bytes, self.config, self.heads = dtype, parse_bytes(shard_size), config, heads

    @property
    def dtype(self) -> Any:
        import torch

        return None if self.dtype_name == "keep" else getattr(torch, self.dtype_name)


def _to_raydz(source: Source, dst: str, options: S3Options, done: Done, form: _Form) -> dict[str, Any]:
    from raydz.hf import write_checkpoint
    from raydz.storage import open_store

    if source.what.startswith("a raydz checkpoint"):
        raise ConfigError(
            "it is a raydz checkpoint already", where=source.uri, remedy="copy it with raydz checkpoint cp"
        )
    return {"uri": write_checkpoint(source, open_store(dst, options), done), "aliases": source.aliases}


def _to_hf(source: Source, dst: str, options: S3Options, done: Done, form: _Form) -> dict[str, Any]:
    from raydz.hf import derive_config, export_folder
    from raydz.hf.folder import read_json
    from raydz.storage import open_store

    if form.config is None:
        config = derive_config(source, heads=form.heads)
    else:
        place, name = _split(form.config)
        config = read_json(open_store(place, options), name)
    if config is None:
        source.notes.append("no config.json: the model is not raydz's decoder, give one with --config")
    export = export_folder(
        source, open_store(dst, options), config_json=config, dtype=form.dtype, shard_bytes=form.shard_bytes, done=done
    )
    return {"uri": export.uri, "files": export.files}


def _to_single(source: Source, dst: str, options: S3Options, done: Done, form: _Form) -> dict[str, Any]:
    from raydz.hf import export_single
    from raydz.storage import open_store

    place, name = _split(dst)
    if not name.endswith(".safetensors"):
        raise ConfigError("not the name of a file", where="DST", got=dst, wanted="a name that ends in .safetensors")
    export = export_single(source, open_store(place, options), name, dtype=form.dtype, done=done)
    return {"uri": export.uri, "files": export.files}


def _split(uri: str) -> tuple[str, str]:
    """Folder and name of a file's path or URI."""
    name = uri.rpartition("/")[2]
    return uri[: len(uri) - len(name)] or ".", name


_WRITERS = {"raydz": _to_raydz, "hf": _to_hf, "single": _to_single}


def _print_renames(renamed: dict[str, str], idle: list[str]) -> None:
    print(f"{len(renamed)} names changed by the key map")
    for new, stored in list(renamed.items())[:_RENAMES_SHOWN]:
        print(f"  {stored} -> {new}")
    if len(renamed) > _RENAMES_SHOWN:
        print(f"  and {len(renamed) - _RENAMES_SHOWN} more: --json has all")
    for rule in idle:
        print(f"note: a rule of the key map matched nothing: {rule}")


def _print(source: Source, found: dict[str, Any], as_json: bool) -> None:
    if as_json:
        kinds = {kind: sum(item.kind == kind for item in source.tensors) for kind in {i.kind for i in source.tensors}}
        own = {"source": source.what, "step": source.step, "kinds": dict(sorted(kinds.items())), "notes": source.notes}
        print(json.dumps(own | found, indent=1))
        return
    for note in source.notes:
        print(f"note: {note}")
    if "renamed" in found:
        _print_renames(found["renamed"], found["unused_rules"])
    if files := found.get("files"):
        print(f"{len(files)} safetensors files, {format_bytes(sum(files.values()))}")
    if source.model and "files" not in found:
        print("to train it with raydz's decoder:\nmodel:")
        for name, value in source.model.items():
            print(f"  {name}: {json.dumps(value)}")
    print(found["uri"])

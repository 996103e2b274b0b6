"""What a configuration leaves open: derived sizes, the identity of the run, absolute paths, and the text to show.

Layer 1. `load` fills sizes and the name; `orchestrate.fit` calls `resolve_paths` on the driver, before workers start in
other working directories.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from raydz import log
from raydz.config.scheduler import with_total_steps

if TYPE_CHECKING:
    from raydz.config.schema import Config

_PACKAGE = "/_ray_pkg_"
_IDENTITY: dict[str, set[str] | None] = {
    # section -> keys that do not decide the result; None: none of them does
    "run": {"name", "root"},
    "data": {"evals", "cache_dir"},
    "train": {"eval_every", "eval_rows", "log_every", "sample_prompt", "sample_tokens", "threads", "device"}
    | {"max_skipped_in_row", "evaluate_ema"},
    "parallel": {"collective_timeout_s", "host_memory_budget", "offload_threads", "offload_affinity"}
    | {"offload_explain_above", "offload_update"},
    "zero_optimization": {"offload_optimizer", "offload_param"},
    **dict.fromkeys(("resume", "resume_key_map", "checkpoint", "storage", "scaling", "failure", "tracking")),
    **dict.fromkeys(("steps_per_print", "wall_clock_breakdown", "aio", "activation_checkpointing")),
}


def fill(config: Config) -> Config:
    """The same run with every size that follows from others written out, and a name."""
    model, data = config.model, config.data
    sizes: dict[str, Any] = {}
    if model.intermediate_size == "auto":
        sizes["intermediate_size"] = -(-8 * model.hidden_size // (3 * 64)) * 64
    if model.max_position_embeddings == "auto":
        sizes["max_position_embeddings"] = data.sequence_length
    if model.num_key_value_heads is None:
        sizes["num_key_value_heads"] = model.num_attention_heads
    if model.vocab_size == "auto" and data.tokenizer.path is None:
        sizes["vocab_size"] = data.tokenizer.vocab_size
    scheduler = with_total_steps(config.scheduler, config.train.steps)
    filled = config.model_copy(update={"model": model.model_copy(update=sizes), "scheduler": scheduler})
    return filled.model_copy(update={"run": config.run.model_copy(update={"name": run_key(filled)})})


def run_key(config: Config) -> str:
    """The identity of a run over restarts: its name, or one made from a hash of what decides the result.

    The hash leaves out the number of workers and what depends on it, paths of outputs, logging, evaluation and
    checkpoint habits; it holds only values that differ from their defaults, so that a release with more keys
    finds the runs of the last one.
    """
    if config.run.name:
        return config.run.name
    text = json.dumps(_identity(config), sort_keys=True, default=list)
    return f"{config._stem}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _identity(config: Config) -> dict[str, Any]:
    values = config.model_dump(exclude_defaults=True)
    if config.train_batch_size is not None:
        # the global batch decides; how it is cut changes with the ranks and not the result
        values.pop("train_micro_batch_size_per_gpu", None)
        values.pop("gradient_accumulation_steps", None)
    for section, undecisive in _IDENTITY.items():
        if undecisive is None:
            values.pop(section, None)
        elif section in values:
            values[section] = {k: v for k, v in values[section].items() if k not in undecisive}
    return {section: value for section, value in values.items() if value != {}}


def to_yaml(config: Config) -> str:
    """The resolved configuration as YAML in the order of the schema; `load` reads it back to an equal one."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)


def resolve_paths(config: Config, base_dir: str | Path | None = None) -> Config:
    """The same run with absolute paths, so that it means the same in every process of this host.

    Outputs (run.root, checkpoint.dir, tracking.mlflow_uri, data.cache_dir, a relative `resume`) are taken relative to
    `base_dir`, else to $RAYDZ_ROOT, else to the working directory; inside the package of a Ray job, which Ray deletes
    with the job, to the home directory, with a warning. Inputs (data, tokenizer, key map, first weights) are taken
    relative to the working directory, and stay relative inside a Ray job's package, which lies elsewhere on other
    nodes.
    """
    base = _base(config, base_dir)
    root = _absolute(config.run.root, base)
    run = config.run.model_copy(update={"root": root})
    checkpoint = config.checkpoint.model_copy(update={"dir": _absolute(config.checkpoint.dir or root, base)})
    tracking = config.tracking.model_copy(update={"mlflow_uri": _mlflow_uri(config.tracking.mlflow_uri, root, base)})
    cache_dir = _absolute(config.data.cache_dir, base) if config.data.cache_dir else str(Path(root, "cache"))
    data = _absolute_inputs(config).model_copy(update={"cache_dir": cache_dir})
    resume = config.resume if config.resume in ("auto", "never") else _absolute(config.resume, base)
    changed = {
        "run": run, "checkpoint": checkpoint, "tracking": tracking, "data": data, "resume": resume,
        "resume_key_map": _absolute_input(config.resume_key_map),
        "model": config.model.model_copy(update={"init_from": _absolute_input(config.model.init_from)}),
    }  # fmt: skip
    return config.model_copy(update=changed)


def _base(config: Config, base_dir: str | Path | None) -> Path:
    if base_dir is not None:
        return Path(base_dir).absolute()
    if os.environ.get("RAYDZ_ROOT"):
        return Path(os.environ["RAYDZ_ROOT"]).absolute()
    if not _in_package():
        return Path.cwd()
    if not Path(config.run.root).expanduser().is_absolute():
        log.get(__name__).warning(
            "the working directory is a Ray job's package, which is deleted with the job: writing under %s; "
            "set RAYDZ_ROOT or an absolute run.root to choose another place",
            Path.home(),
        )
    return Path.home()


def _in_package() -> bool:
    return _PACKAGE in f"{Path.cwd()}/"


def _absolute_input(path: str | None) -> str | None:
    return path if path is None or _in_package() else _absolute(path, Path.cwd())


def _absolute_inputs(config: Config) -> Any:
    data = config.data
    if _in_package():
        return data
    here = Path.cwd()

    def absolute(sources: list[Any]) -> list[Any]:
        return [source.model_copy(update={"path": _absolute(source.path, here)}) for source in sources]

    tokenizer = data.tokenizer
    if tokenizer.path:
        tokenizer = tokenizer.model_copy(update={"path": _absolute(tokenizer.path, here)})
    evals = {name: absolute(sources) for name, sources in data.evals.items()}
    return data.model_copy(update={"sources": absolute(data.sources), "evals": evals, "tokenizer": tokenizer})


def _absolute(path: str, base: Path) -> str:
    """`path` under `base`; URIs (`s3://...`, `sample:...`) are left as they are."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:", path):
        return path
    return os.path.normpath(base / Path(path).expanduser())


def _mlflow_uri(uri: str | None, root: str, base: Path) -> str:
    if uri is None:
        return f"sqlite:///{root}/mlflow.db"
    prefix = "sqlite:///"
    if uri.startswith(prefix):
        return prefix + _absolute(uri.removeprefix(prefix), base)
    # bare words such as `databricks` are profiles of MLflow, not folders
    return _absolute(uri, base) if "/" in uri else uri

"""Names of DeepSpeed that raydz has not, with the reason and what to use in their place.

Neighbours: `__init__`, `comm`, `zero` and `engine` ask here before they give up on a name.
"""

from __future__ import annotations

from typing import Any, NoReturn

from raydz.errors import ConfigError

_REASONS = {
    "deepspeed": {
        "DeepSpeedConfig": "raydz.config.load_engine reads and checks such a file",
        "DeepSpeedOptimizer": "the optimizer is the engine's own",
        "DeepSpeedTransformerLayer": "models are plain torch modules",
        "InferenceEngine": "the face is for training; call engine(...) under torch.no_grad()",
        "OnDevice": "build the model under torch.device('meta')",
        "PipelineEngine": "pipeline stages are not raydz's kind of parallelism",
        "PipelineModule": "pipeline stages are not raydz's kind of parallelism",
        "add_tuning_arguments": "put the scheduler into the configuration file",
        "checkpointing": "use torch.utils.checkpoint",
        "init_inference": "the face is for training; call engine(...) under torch.no_grad()",
        "moe": "expert parallelism comes with a later release",
        "ops": "optimizers are raydz's own: name one in the configuration's optimizer section",
        "pipe": "pipeline stages are not raydz's kind of parallelism",
        "runtime": "it is DeepSpeed's inside; raydz.engine and raydz.zero are raydz's",
        "tp_model_init": "tensor parallelism comes with a later release",
        "utils": "use torch and logging directly",
    },
    "DeepSpeedEngine": {
        "allreduce_gradients": "backward reduces the gradients itself",
        "clip_fp32_gradients": "set gradient_clipping",
        "compile": "compile the model before it is handed over",
        "coalesce_grad_reduction": "set parallel.gradient_reduction to boundary",
        "eval_batch": "it belongs to pipelines; call engine(...) under torch.no_grad()",
        "set_data_post_process_func": "the data is the script's own",
        "set_gradient_accumulation_boundary": "the engine counts micro-batches: set gradient_accumulation_steps",
        "set_train_batch_size": "a training keeps its batch size; build another engine",
        "set_train_micro_batch_size": "a training keeps its batch size; build another engine",
        "train_batch": "it belongs to pipelines; call engine(...), backward and step",
    },
}


def refuse_name(name: str, where: str) -> NoReturn:
    """Say that `name` is not there.

    Raises:
        AttributeError: Python's own names (`__path__` and its like), which are only asked for.
        ConfigError: any other.
    """
    if name.startswith("__"):
        raise AttributeError(f"{where} has no attribute {name!r}")
    raise NameRefused(
        "raydz does not have this part of DeepSpeed", where=f"{where}.{name}",
        remedy=_REASONS.get(where, {}).get(name, "see raydz/deepspeed/README.md for what is there"),
    )  # fmt: skip


class NameRefused(ConfigError, AttributeError):
    """Also an AttributeError, so that `hasattr` and `getattr` with a default answer as scripts expect."""


def refused_in(where: str) -> dict[str, str]:
    """The names of DeepSpeed that are known to be missing in `where`."""
    return _REASONS.get(where, {})


def refuse_arguments(where: str, remedies: dict[str, str], given: dict[str, Any]) -> None:
    """Refuse every argument that asks for something (is neither None nor False).

    Raises:
        ConfigError: names the argument and what to do.
    """
    for name, value in given.items():
        if value is not None and value is not False:
            raise ConfigError(
                "raydz does not do this", where=f"{where}({name}=…)", got=type(value).__name__, remedy=remedies[name]
            )

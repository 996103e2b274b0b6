"""One YAML, JSON or dict to one checked configuration; imports no torch, so that plans and errors come at once.

`load` gives a run's `Config`, `load_engine` the `EngineConfig` of a DeepSpeed file. Start reading at `load`; `schema`
and `engine` list every key, `deepspeed` says what becomes of DeepSpeed's. README.md has the picture.
"""

from raydz.config.batch import BatchSize, resolve_batch
from raydz.config.engine import EngineConfig, OptimizerConfig, ParallelConfig, SchedulerConfig, ZeroConfig
from raydz.config.load import check_trainable, load, load_engine
from raydz.config.resolve import resolve_paths, run_key, to_yaml
from raydz.config.schema import (
    CheckpointConfig,
    Config,
    DataConfig,
    LossSpikeConfig,
    ModelConfig,
    ScalingConfig,
    SourceConfig,
    StorageConfig,
    TokenizerConfig,
    TrackingConfig,
    TrainConfig,
)

__all__ = [
    "BatchSize",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EngineConfig",
    "LossSpikeConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ScalingConfig",
    "SchedulerConfig",
    "SourceConfig",
    "StorageConfig",
    "TokenizerConfig",
    "TrackingConfig",
    "TrainConfig",
    "ZeroConfig",
    "check_trainable",
    "load",
    "load_engine",
    "resolve_batch",
    "resolve_paths",
    "run_key",
    "to_yaml",
]

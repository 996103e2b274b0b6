"""raydz: Ray-orchestrated, ZeRO-sharded training with checkpoints that any later job can load.

Ways in: `raydz.fit(config)` (Ray), `raydz.initialize(model, config)` (torchrun or one process), `raydz.load_config`.
Everything is imported when first used, so that `import raydz` needs neither torch nor ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from raydz.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    LayoutError,
    NativeError,
    PlacementError,
    RaydzError,
    StorageError,
    TrainingError,
)
from raydz.version import __version__

_HOMES = {
    "Config": "raydz.config",
    "Engine": "raydz.engine",
    "Result": "raydz.train.result",
    "fit": "raydz.orchestrate.fit",
    "initialize": "raydz.engine",
    "load_config": "raydz.config",
}
_NAMES = {"load_config": "load"}

__all__ = [
    "CheckpointError",
    "ConfigError",
    "DataError",
    "LayoutError",
    "NativeError",
    "PlacementError",
    "RaydzError",
    "StorageError",
    "TrainingError",
    "__version__",
    *_HOMES,
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'raydz' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), _NAMES.get(name, name))

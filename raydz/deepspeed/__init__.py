"""The drop-in face of DeepSpeed: `from raydz import deepspeed` in place of `import deepspeed`. Layer 9.

Neighbours: `initialize.py` takes a script's arguments apart, `engine.py` has the names that scripts call on what it
returns; below both is `raydz.engine`. What is honoured and what differs stands in README.md here. A name of DeepSpeed
that is not here is refused with a typed error.
"""

from __future__ import annotations

from typing import Any

from raydz.deepspeed import comm, zero
from raydz.deepspeed.arguments import add_config_arguments, init_distributed
from raydz.deepspeed.engine import DeepSpeedEngine
from raydz.deepspeed.initialize import initialize
from raydz.deepspeed.refusals import refuse_name
from raydz.version import __version__

__all__ = [
    "DeepSpeedEngine",
    "__version__",
    "add_config_arguments",
    "comm",
    "init_distributed",
    "initialize",
    "zero",
]


def __getattr__(name: str) -> Any:
    refuse_name(name, "deepspeed")

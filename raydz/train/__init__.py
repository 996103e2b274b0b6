"""The training loop and what it needs around a step: layer 6. Read `loop.py` first; README.md in this folder."""

from raydz.train.loop import run_training
from raydz.train.result import Result

__all__ = ["Result", "run_training"]

"""The ZeRO engine's core: units, flat groups, hooks, sharded update. Layer 4. See README.md in this folder."""

from raydz.zero.communicators import Communicators
from raydz.zero.hooks import install_hooks
from raydz.zero.layout import GroupLayout, Interval, Segment
from raydz.zero.options import ZeroOptions
from raydz.zero.policy import StagePolicy
from raydz.zero.sharded import ShardedModel, Unit
from raydz.zero.units import ParameterSpec, UnitSpec, find_units
from raydz.zero.update import ShardedOptimizer

__all__ = [
    "Communicators",
    "GroupLayout",
    "Interval",
    "ParameterSpec",
    "Segment",
    "ShardedModel",
    "ShardedOptimizer",
    "StagePolicy",
    "Unit",
    "UnitSpec",
    "ZeroOptions",
    "find_units",
    "install_hooks",
]

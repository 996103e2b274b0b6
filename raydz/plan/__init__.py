"""Memory and communication of a run before it starts. Layer 6; imports no torch. See README.md in this folder.

`Planner.at` is the entry: `cli/plan.py` asks it for a table, `train/memory.py` before the engine is built.
"""

from raydz.plan.activations import Workload
from raydz.plan.advice import advise, offload_asked
from raydz.plan.budget import check_fits, describe_parts, key_to_change, out_of_memory
from raydz.plan.estimate import Plan, Planner
from raydz.plan.memory import Memory
from raydz.plan.model import Outline, decoder_planner, decoder_sizes, with_outline, workload
from raydz.plan.shapes import DecoderSizes, ParameterShape, UnitShape, decoder_units

__all__ = [
    "DecoderSizes",
    "Memory",
    "Outline",
    "ParameterShape",
    "Plan",
    "Planner",
    "UnitShape",
    "Workload",
    "advise",
    "check_fits",
    "decoder_planner",
    "decoder_sizes",
    "decoder_units",
    "describe_parts",
    "key_to_change",
    "offload_asked",
    "out_of_memory",
    "with_outline",
    "workload",
]

"""Optimizers over flat shards, learning-rate schedules, norm and clipping: layer 3. See README.md in this folder."""

from raydz.optim.build import build_optimizer
from raydz.optim.clip import clip_scale, combine_norms
from raydz.optim.loss_scale import LossScale, LossScaleRule, build_loss_scale
from raydz.optim.muon import Muon
from raydz.optim.optimizer import AdamW, Optimizer, Update
from raydz.optim.schedule import Schedule, build_schedule
from raydz.optim.weights import WeightShard
from raydz.optim.widening import Part, Widening

__all__ = [
    "AdamW",
    "LossScale",
    "LossScaleRule",
    "Muon",
    "Optimizer",
    "Part",
    "Schedule",
    "Update",
    "WeightShard",
    "Widening",
    "build_loss_scale",
    "build_optimizer",
    "build_schedule",
    "clip_scale",
    "combine_norms",
]

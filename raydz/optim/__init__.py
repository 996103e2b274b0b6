"""Optimizers over flat shards, learning-rate schedules, norm and clipping: layer 3. See README.md in this folder."""

from raydz.optim.clip import clip_scale, combine_norms
from raydz.optim.optimizer import Optimizer, build_optimizer
from raydz.optim.schedule import Schedule, build_schedule
from raydz.optim.weights import WeightShard

__all__ = ["Optimizer", "Schedule", "WeightShard", "build_optimizer", "build_schedule", "clip_scale", "combine_norms"]

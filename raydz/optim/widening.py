"""fp32 copies of bf16 masters and states for the length of an update, rounded back by chance.

Neighbours: `zero/update.py` calls `Widening.update`, `zero/matrices.py` works within `Widening.lend`;
`ops/stochastic.py` has the arithmetic. See "bf16 states" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from raydz.ops.native import kernels_for
from raydz.ops.stochastic import LANES, Noise, noise_key, random_words, round_stochastic
from raydz.optim.optimizer import Optimizer, Update
from raydz.optim.weights import WeightShard


@dataclass(frozen=True)
class Part:
    """Elements of a parameter in a step, from `start` on: together with the seed, what their rounding depends on."""

    name: str
    start: int
    step: int


@dataclass(frozen=True)
class Widening:
    """Lends what an optimizer wants in place of what is kept.

    Args:
        piece_numel: how many elements to lend at a time: few enough for a core's cache, or to fill an accelerator.
    """

    seed: int
    piece_numel: int

    @classmethod
    def on(cls, device: torch.device, seed: int) -> Widening:
        return cls(seed, 1 << (16 if device.type == "cpu" else 24))

    def update(
        self,
        optimizer: Optimizer,
        weights: WeightShard,
        grad: Tensor,
        state: dict[str, Tensor],
        now: Update,
        part: Part,
    ) -> None:
        """`optimizer.update` of what is kept in bf16: in one pass where a kernel can round, else through fp32 copies.

        Both give the same bits. Shape: all (n,).
        """
        if optimizer.takes_noise and kernels_for(weights.compute):
            noise = Noise(noise_key(self.seed, part.step, part.name), part.start)
            optimizer.update(weights, grad, state, replace(now, noise=noise))
            return
        numel = weights.compute.numel()
        for start in range(0, numel, self.piece_numel):
            stop = min(start + self.piece_numel, numel)
            kept = {name: tensor[start:stop] for name, tensor in state.items()}
            own = replace(part, start=part.start + start)
            with self.lend(weights.slice(start, stop), kept, own) as (wide, wide_state):
                optimizer.update(wide, grad[start:stop], wide_state, now)

    @contextmanager
    def lend(
        self, weights: WeightShard, state: dict[str, Tensor], part: Part
    ) -> Iterator[tuple[WeightShard, dict[str, Tensor]]]:
        """`weights` and `state` in fp32 within the block; afterwards they hold what became of the copies, rounded.

        What is fp32 already, or has a remainder beside bf16, is lent itself. Shape: all (n,).
        """
        is_rounded = weights.compute.dtype == torch.bfloat16 and weights.low is None
        wide = WeightShard(weights.compute.float()) if is_rounded else weights
        wide_state = {name: tensor.float() for name, tensor in state.items()}
        yield wide, wide_state
        kept = [(weights.compute, wide.compute, 0)] if is_rounded else []
        for lane, name in enumerate(sorted(state), start=1):
            if state[name].dtype == torch.bfloat16:
                assert lane < LANES
                kept.append((state[name], wide_state[name], lane))
        if kept:
            first, numel = part.start, kept[0][0].numel()
            key = noise_key(self.seed, part.step, part.name)
            words = random_words(key, first, first + numel, kept[0][0].device)
            for out, values, lane in kept:
                round_stochastic(values, words, lane, out)

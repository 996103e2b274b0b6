"""An exponential moving average of the weights, kept as fp32 shards beside the masters.

Neighbours: `engine.py` updates it after each committed step and evaluates under it; `checkpoint/pieces.py` saves it as
the kind `ema`. See "Averaged weights" in README.md.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from raydz.errors import ConfigError
from raydz.zero.group import FlatGroup
from raydz.zero.sharded import ShardedModel

KIND = "ema"


class ShardedAverage:
    """Of every trainable group's owned elements.

    Attributes:
        values: fp32 (owned,) a trainable group; the masters themselves at first.

    Raises:
        ConfigError: the decay is not within [0, 1).
    """

    def __init__(self, sharded: ShardedModel, decay: float) -> None:
        if not 0 <= decay < 1:
            raise ConfigError("not the decay of an average", where="ema_decay", got=decay, wanted="0 <= decay < 1")
        self.decay = decay
        self._groups: list[FlatGroup] = [grads.group for grads in sharded.gradients]
        self.values: list[Tensor] = [group.weights.master().float().clone() for group in self._groups]

    def of(self, group: FlatGroup) -> Tensor | None:
        """The average of `group`; None of a frozen one."""
        found = (values for known, values in zip(self._groups, self.values, strict=True) if known is group)
        return next(found, None)

    def rebuilt(self, sharded: ShardedModel) -> ShardedAverage:
        """The same average over the model's groups as they are now: those that stayed keep it, new ones begin anew."""
        new = ShardedAverage(sharded, self.decay)
        for group, values in zip(new._groups, new.values, strict=True):
            kept = self.of(group)
            if kept is not None:
                values.copy_(kept)
        return new

    def update(self) -> None:
        """Move a share of 1 - decay towards the masters: `ema = decay * ema + (1 - decay) * master`."""
        for group, values in zip(self._groups, self.values, strict=True):
            values.lerp_(group.weights.master().float(), 1 - self.decay)

    def restart(self) -> None:
        """Begin again at the masters."""
        for group, values in zip(self._groups, self.values, strict=True):
            values.copy_(group.weights.master())

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let the model compute with the average within the block; training goes on from the same bits after it.

        Memory: nothing but one group's masters at a time, since average and masters change places; where bf16 weights
        are their own masters, and so have no room for the average's bits, a copy of it.
        """
        pairs = zip(self._groups, self.values, strict=True)
        exact = [(values, values.clone()) for group, values in pairs if group.is_own_master]
        self._exchange()
        try:
            yield
        finally:
            self._exchange()
            for values, kept in exact:
                values.copy_(kept)

    def _exchange(self) -> None:
        for group, values in zip(self._groups, self.values, strict=True):
            masters = group.weights.master().float().clone()
            group.weights.store(values)
            values.copy_(masters)
            group.mark_updated()

"""The part of the public Engine that lends its device memory: states move to the host between phases, and come back.

Neighbours: `engine.py` inherits it; `offload/moves.py` moves storages; `sharded.py` refuses what needs them meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from raydz.config import EngineConfig
from raydz.dist import World
from raydz.errors import ConfigError
from raydz.offload.memory import HostMemory, host_budget
from raydz.offload.moves import StorageMoves
from raydz.zero.average import ShardedAverage
from raydz.zero.sharded import ShardedModel
from raydz.zero.update import ShardedOptimizer

MOVABLE = ("optim_states", "hp_params", "lp_params", "lp_grads", "contiguous_grad_buffer")
"""DeepSpeed's names: optimizer states (and the average of the weights); fp32 masters beside 16-bit weights; weights as
forward reads them (and as they are updated, where they are their own masters); reduced gradients; the buffers that
backward fills."""


class MoveAccess:
    """Moves of a sharded module's state; the engine has the attributes."""

    sharded: ShardedModel
    optimizer: ShardedOptimizer
    average: ShardedAverage | None
    world: World
    config: EngineConfig
    settle: Callable[[], None]

    @cached_property
    def host_memory(self) -> HostMemory:
        """What all that is offloaded takes its host memory from."""
        return HostMemory(host_budget(self.config.parallel.host_memory_budget, self.world.local_world_size))

    @cached_property
    def state_moves(self) -> StorageMoves:
        """What is away, and the host buffers for it."""
        return StorageMoves(self.host_memory, self.world.device)

    def offload_states(
        self,
        include: Sequence[Any] | None = None,
        device: Any = "cpu",
        pin_memory: bool = True,
        non_blocking: bool = False,
    ) -> None:
        """Move states to host memory, and give their device memory back to the system, until `reload_states`.

        Meanwhile what needs them is refused by name: any training, saving, loading or export; forward only where the
        weights are away. What offload keeps in host memory anyway stays there. May be called again for more.

        Args:
            include: some of `MOVABLE` (DeepSpeed's enumeration fits, too); None: all.
            device: `cpu`, the only one.
            non_blocking: return when the copies are launched.

        Collective: every rank, so that none waits for another's weights. Memory: on the host as much as leaves.

        Raises:
            ConfigError: another device, or an unknown name. OffloadError: the host's budget is spent; nothing moved.
        """
        wanted = _names(include)
        if str(getattr(device, "value", device)) != "cpu":
            raise ConfigError(
                "states move to host memory alone", where="offload_states(device=…)", got=device, wanted="cpu"
            )  # fmt: skip
        self.settle()
        self.optimizer.finish()
        tensors = [tensor for name in MOVABLE if name in wanted for tensor in self._movable(name)]
        self.state_moves.send(tensors, pinned=pin_memory, blocking=not non_blocking)
        self.sharded.set_absent(self.sharded.absent | wanted)
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring everything that `offload_states` moved away back, to the last bit.

        Args:
            non_blocking: return when the copies are launched; only what is launched on this stream may follow.
        """
        if self.sharded.absent:
            self.state_moves.bring_back(blocking=not non_blocking)
            self.sharded.set_absent(frozenset())

    def close_moves(self) -> None:
        """Give back the host buffers that are kept for the next move."""
        if "state_moves" in vars(self):
            self.state_moves.close()

    def _movable(self, name: str) -> Iterator[Tensor]:
        groups, gradients = self.sharded.groups, self.sharded.gradients
        found: list[Tensor | None] = []
        if name == "optim_states":
            found = [tensor for states in self.optimizer.states for tensor in states.values()]
            found += self.average.values if self.average is not None else []
        elif name == "hp_params":
            found = [tensor for group in groups for tensor in (group.weights.low, group.weights.separate)]
        elif name == "lp_params":
            found = [tensor for group in groups for tensor in group.weight_buffers()]
        elif name == "lp_grads":
            found = [grads.reduced for grads in gradients]
        else:
            found = [grads.buffer for grads in gradients]
        yield from (tensor for tensor in found if tensor is not None)


def _names(include: Sequence[Any] | None) -> frozenset[str]:
    """The names asked for.

    Raises:
        ConfigError: one is unknown.
    """
    if include is None:
        return frozenset(MOVABLE)
    names = [str(getattr(name, "value", name)) for name in include]
    unknown = next((name for name in names if name not in MOVABLE), None)
    if unknown is not None:
        raise ConfigError(
            "no such states", where="offload_states(include=…)", got=unknown, wanted=", ".join(MOVABLE),
        )  # fmt: skip
    return frozenset(names)

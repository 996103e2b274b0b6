"""The blocks of a model, and a forward put in place of theirs: inside the hooks of `zero/`, so that these stay outside
of what is recomputed or compiled.

Neighbours: `checkpointing.py` and `compiling.py` change a block's forward through this; `zero/units.py` finds units.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from raydz.errors import ConfigError
from raydz.zero.units import UnitSpec, find_units

Forward = Callable[..., Any]


class BlockForward:
    """What a block's `forward` is while it trains: recomputed, compiled, both, or as it was.

    Without gradients and in evaluation it is the block's own forward.

    Attributes:
        mode: how much is recomputed in backward, one of `checkpointing.MODES`.
        backend: of torch.compile; None: not compiled.
        offloads: inputs wait for backward in host memory.
    """

    def __init__(self, block: nn.Module) -> None:
        self.block, self.own = block, block.forward
        self.mode = "none"
        self.backend: str | None = None
        self.offloads = False
        self._wrap: Callable[[Forward], Forward] = _unchanged
        self._training: Forward = self.own

    @classmethod
    def of(cls, block: nn.Module) -> BlockForward:
        """The one that `block` has, or a new one in its place."""
        found = block.__dict__.get("forward")
        if not isinstance(found, cls):
            found = cls(block)
            block.forward = found
        return found

    def recompute(self, mode: str, wrap: Callable[[Forward], Forward]) -> None:
        """Let `wrap` of the block's own forward run while it trains."""
        self.mode, self._wrap = mode, wrap
        self._build()

    def compile(self, backend: str) -> None:
        """Compile what runs while the block trains, recomputation included."""
        self.backend = backend
        self._build()

    def offload_inputs(self, wrap: Callable[[Forward], Forward]) -> None:
        """As `recompute`, with a `wrap` that keeps inputs in host memory. Raises: ConfigError: it is compiled."""
        self.offloads, self._wrap = True, wrap
        self._build()

    def _build(self) -> None:
        if self.offloads and self.backend is not None:
            raise ConfigError(
                "inputs of compiled blocks are not offloaded", where="activation_checkpointing.cpu_checkpointing",
                got=f"model.compile with {self.backend}", remedy="set one of the two to false",
            )  # fmt: skip
        self._training = self._wrap(self.own)
        if self.backend is not None:
            self._training = torch.compile(self._training, fullgraph=True, backend=self.backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains = self.block.training and torch.is_grad_enabled()
        return (self._training if trains else self.own)(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> BlockForward:
        clone = memo[id(self)] = BlockForward.__new__(BlockForward)
        clone.block, clone.own = copy.deepcopy(self.block, memo), copy.deepcopy(self.own, memo)
        clone.mode, clone.backend, clone._wrap = self.mode, self.backend, self._wrap
        clone.offloads = self.offloads
        clone._build()  # compiled code holds on to its own block
        return clone


def _unchanged(forward: Forward) -> Forward:
    return forward


def find_blocks(model: nn.Module, patterns: Sequence[str] | None = None) -> list[UnitSpec]:
    """The outermost units of `model` that are made of modules: not the root, and no table or single layer.

    Args:
        patterns: `parallel.units`.
    """
    blocks: list[UnitSpec] = []
    for unit in find_units(model, patterns)[1:]:
        is_inside = any(unit.name.startswith(f"{block.name}.") for block in blocks)
        if unit.module._modules and not is_inside:
            blocks.append(unit)
    return blocks


def refuse_inner_units(model: nn.Module, patterns: Sequence[str] | None) -> None:
    """A unit within a block that is compiled or recomputed selectively would have its gathers recorded with the block.

    Raises:
        ConfigError: there is one.
    """
    special = {}
    for name, module in model.named_modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, BlockForward) and (forward.backend or forward.mode == "selective"):
            special[name] = "compiled" if forward.backend else "recomputed selectively"
    for unit in find_units(model, patterns) if special else ():
        outer = next((name for name in special if unit.name.startswith(f"{name}.")), None)
        if outer is not None:
            raise ConfigError(
                f"a unit of its own within a block that is {special[outer]}", where="parallel.units", got=unit.name,
                wanted=f"nothing within {outer}", remedy='name whole blocks, or use "full" without model.compile',
            )  # fmt: skip

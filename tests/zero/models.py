"""Small models of odd sizes, each with one habit that a sharding engine may stumble over. Ids (B, T) to logits."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, INNER = 7, 6, 10


class Block(nn.Module):
    """A residual layer of two matrices and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Plain(nn.Module):
    """Embedding, blocks, head; `recompute` is how blocks are checkpointed, `order` how they are called."""

    def __init__(
        self, blocks: int = 2, *, recompute: str = "", order: tuple[int, ...] = (), tied: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(self.make_block() for _ in range(blocks))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.recompute, self.order = recompute, order or tuple(range(blocks))

    def make_block(self) -> nn.Module:
        return Block()

    def forward(self, ids: Tensor, *, order: tuple[int, ...] = ()) -> Tensor:
        x = self.embed(ids)
        for index in order or self.order:
            block = self.layers[index]
            if self.recompute:
                x = checkpoint(block, x, use_reentrant=self.recompute == "reentrant")
            else:
                x = block(x)
        return self.head(self.norm(x))


class Adapted(Plain):
    """Blocks that are frozen but for a vector near their output; the embedding below them is trained through them."""

    class FrozenBlock(Block):
        def __init__(self) -> None:
            super().__init__()
            self.requires_grad_(False)
            self.scale = nn.Parameter(torch.ones(WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * super().forward(x)

    def make_block(self) -> nn.Module:
        return Adapted.FrozenBlock()


class OfNothing(nn.Module):
    """A unit all of whose parameters are empty."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, 0))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight)


class OddSizes(nn.Module):
    """Parameters of no elements, of one, of a prime number, of fewer than ranks; all in use."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.single = nn.Parameter(torch.tensor([1.3]))
        self.three = nn.Parameter(torch.linspace(0.5, 1, 3))
        self.prime = nn.Parameter(torch.linspace(-1, 1, 13 * WIDTH).view(WIDTH, 13))
        self.empty = nn.ModuleList([OfNothing()])
        self.head = nn.Linear(13, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) * self.scalar * self.single + self.nothing.sum()
        x = x * self.three.repeat(2)
        x = x + self.empty[0](x[..., :0])
        return self.head(torch.tanh(x @ self.prime))


class Optional(nn.Module):
    """A layer that is used when it is asked for, and one that never is."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.extra, self.never = nn.Linear(WIDTH, WIDTH), nn.Linear(3, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor, *, uses_extra: bool = False) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.extra(x) if uses_extra else x)


@dataclasses.dataclass
class Hidden:
    x: Tensor
    note: str = "no tensor"


class Pair(NamedTuple):
    x: Tensor
    doubled: Tensor


class Wrapped(Plain):
    """Blocks and model that hand over tensors in a container."""

    class WrappingBlock(Block):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: Pair) -> object:
            y = super().forward(x.x + 0 * x.doubled)
            containers = {
                "dict": {"x": y}, "dataclass": Hidden(y), "tuple": (y, None), "nested": [{"x": (y,)}],
                "named": Pair(y, y),
            }  # fmt: skip
            return containers[self.kind]

    def __init__(self, kind: str) -> None:
        self.kind = kind
        super().__init__()

    def make_block(self) -> nn.Module:
        return Wrapped.WrappingBlock(self.kind)

    def forward(self, ids: Tensor) -> object:
        x = self.embed(ids)
        for block in self.layers:
            x = first_tensor(block(Pair(x, 2 * x)))
        return {"logits": self.head(self.norm(x)), "hidden": x}


def first_tensor(value) -> Tensor:
    """The tensor that a `Wrapped` block returns."""
    while not isinstance(value, Tensor):
        if isinstance(value, Hidden):
            value = value.x
        else:
            value = next(iter(value.values())) if isinstance(value, dict) else value[0]
    return value


class ByWeight(Plain):
    """Uses a unit's weight without calling the unit, as fused losses do with the head."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.layers:
            x = block(x)
        return F.linear(self.norm(x), self.head.weight)


class ScaledEmbedding(nn.Embedding):
    """An embedding whose backward does need a parameter."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5))

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids) * self.scale


class Scaled(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.embed = ScaledEmbedding()


class TiedWithBias(Plain):
    """The head shares its weight with the embedding and has a bias of its own: one module, two units."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embed.weight


class _ScaleGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


class Poisoned(Plain):
    """The gradient of one vector, and nothing else, is multiplied by `factor`."""

    def __init__(self) -> None:
        super().__init__()
        self.spot = nn.Parameter(torch.linspace(-1, 1, WIDTH))

    def forward(self, ids: Tensor, *, factor: float = 1.0) -> Tensor:
        x = self.embed(ids) + _ScaleGradient.apply(self.spot, factor)
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))

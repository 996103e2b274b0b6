"""The small model of the recorded DeepSpeed checkpoints, with the parameters that go wrong: tied, frozen, odd, single.

Neighbours: `record.py` trains it under DeepSpeed; the tests train it on under raydz.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, WIDTH, INNER = 29, 6, 7
ROWS_A_RANK, RANKS = 2, 2
STEPS = 3
"""Steps before the checkpoint."""
NEXT_STEPS = 2
ADAM = {"lr": 0.02, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.0}
CLIENT_STATE = {"samples": 12, "note": "recorded"}


class Foreign(nn.Module):
    """Token ids to logits; sizes that no world size divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.up = nn.Linear(WIDTH, INNER)
        self.norm = nn.LayerNorm(INNER)
        self.down = nn.Linear(INNER, WIDTH)
        self.gain = nn.Parameter(torch.ones(1))
        self.fixed = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("offset", torch.ones(WIDTH))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.down(torch.tanh(self.norm(self.up(x)))) * self.gain
        x = x + self.offset * self.fixed.mean()  # DeepSpeed leaves one of these in fp32
        return self.head(x.to(self.head.weight.dtype))


def build() -> Foreign:
    """The model with the values that the recorded training began with."""
    model, generator = Foreign(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.3)
    return model


def batch(step: int, row: int, num_rows: int) -> tuple[Tensor, Tensor]:
    """Token ids and labels of `num_rows` rows of a step, from `row` on."""
    generator = torch.Generator().manual_seed(1000 + step)
    tokens = torch.randint(0, VOCAB, (ROWS_A_RANK * RANKS, 6), generator=generator)[row : row + num_rows]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean over tokens."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

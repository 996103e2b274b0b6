"""The output head of the decoder: logits, or the loss itself, so that whole logits need never exist.

Neighbours: `decoder.py` calls it. It is a unit of `zero/` (or its weight is the root's, where embeddings are tied): the
loss has to be computed inside its forward, because its weight is current nowhere else.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from raydz.models.loss import chunked_cross_entropy, cross_entropy_sum

_MOST_TOKENS = 2048  # enough rows for a GPU: see the table in README.md


class OutputHead(nn.Linear):
    """A linear layer without bias from hidden states to logits, or with labels to their loss.

    Args:
        loss_chunk_tokens: tokens whose logits exist at a time; 0: of all tokens; auto: see `chunk_tokens`.
    """

    def __init__(self, hidden_size: int, vocab_size: int, loss_chunk_tokens: int | Literal["auto"] = "auto") -> None:
        super().__init__(hidden_size, vocab_size, bias=False)
        self.loss_chunk_tokens = loss_chunk_tokens

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> Tensor:
        """Shape: hidden (B, T, D) -> logits (B, T, V); with labels (B, T) the sum of their losses, a scalar."""
        if labels is None:
            return super().forward(hidden)
        flat, labels = hidden.flatten(0, 1), labels.flatten()
        chunk = self.chunk_tokens(flat.dtype)
        if chunk == 0:
            return cross_entropy_sum(super().forward(flat), labels)
        return chunked_cross_entropy(flat, self.weight, labels, chunk)

    def chunk_tokens(self, dtype: torch.dtype) -> int:
        """Tokens of a chunk. auto: as many as the hidden size, so that logits have as many elements as the weight,
        2048 at most; in fp16 0, because a loss scale reaches only gradients that are made in backward.
        """
        if self.loss_chunk_tokens != "auto":
            return self.loss_chunk_tokens
        return 0 if dtype == torch.float16 else min(self.in_features, _MOST_TOKENS)

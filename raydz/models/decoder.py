"""A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Neighbours: `train/build.py` makes one on the meta device; `zero/` shards it and asks `initial_values`; `loss.py` gives
it the labels; `attention.py`, `head.py` and `checkpointing.py` hold its parts. Names of modules and parameters are
those of Hugging Face's Llama.

Shapes in comments: B rows, T positions, D hidden, H heads, K key-value heads, E = D / H.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydz.models.attention import AttentionCase, AttentionChoice, attend, choose, document_mask
from raydz.models.checkpointing import wrap_blocks
from raydz.models.head import OutputHead
from raydz.models.init import normal_values


@dataclass(frozen=True)
class DecoderShape:
    """Sizes under Hugging Face's names, and what is traded for memory.

    Args:
        activation_checkpointing: one of `checkpointing.MODES`; true is "full".
        loss_chunk_tokens: see `OutputHead`.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    intermediate_size: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    activation_checkpointing: bool | str = False
    loss_chunk_tokens: int | Literal["auto"] = "auto"

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


class RotaryTable:
    """Cosines and sines for given positions; nothing is stored in the model."""

    def __init__(self, head_dim: int, theta: float) -> None:
        self.head_dim, self.theta = head_dim, theta

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Shape: positions (B, T) -> two of (B, 1, T, E)."""
        exponent = torch.arange(0, self.head_dim, 2, device=positions.device, dtype=torch.float32) / self.head_dim
        angles = positions[:, None, :, None].float() * (self.theta**-exponent)
        angles = torch.cat((angles, angles), -1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn pairs (i, i + E/2) of the last dimension by the position's angle. Shape: x (B, H, T, E)."""
    left, right = x.chunk(2, -1)
    return x * cos + torch.cat((-right, left), -1) * sin


class Attention(nn.Module):
    """Grouped-query self-attention, causal, within documents where a mask is given."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.head_dim = shape.head_dim
        inner, kv = shape.hidden_size, shape.num_key_value_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, inner, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv, bias=False)
        self.o_proj = nn.Linear(inner, shape.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, repeats_heads: bool = False) -> Tensor:
        b, t, d = x.shape
        q, k, v = (
            projection(x).view(b, t, projection.out_features // self.head_dim, self.head_dim).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        mixed = attend(q, k, v, mask, repeats_heads=repeats_heads)
        return self.o_proj(mixed.transpose(1, 2).reshape(b, t, d))


class FeedForward(nn.Module):
    """SwiGLU. Source: Shazeer 2020, GLU variants improve Transformer."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention and feed-forward, each normalised before and added to the stream."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)
        self.mlp = FeedForward(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor | None, repeats_heads: bool = False) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, mask, repeats_heads)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    """Embedding, blocks and the last norm."""

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_hidden_layers))
        self.norm = nn.RMSNorm(shape.hidden_size, eps=shape.rms_norm_eps)


class Decoder(nn.Module):
    """Token ids to logits, or with labels to their loss."""

    returns_loss_sum = True

    def __init__(self, shape: DecoderShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Trunk(shape)
        self.lm_head = OutputHead(shape.hidden_size, shape.vocab_size, shape.loss_chunk_tokens)
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        self._rotary = RotaryTable(shape.head_dim, shape.rope_theta)
        wrap_blocks(self, shape.activation_checkpointing)

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        document_ids: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Predict the next token at every position.

        Shape: input_ids, position_ids, document_ids, labels (B, T) -> (B, T, vocab_size), or with labels a scalar.

        Args:
            position_ids: rotary positions; None counts from 0.
            document_ids: positions see only earlier ones with the same number; None is one document a row.
            labels: already shifted, `IGNORE_INDEX` where none counts; the result is the sum of their losses.
        """
        b, t = input_ids.shape
        if position_ids is None:
            position_ids = torch.arange(t, device=input_ids.device).expand(b, t)
        mask = None if document_ids is None else document_mask(document_ids)
        x = self.model.embed_tokens(input_ids)
        cos, sin = self._rotary(position_ids, x.dtype)
        repeats_heads = self._attention(x.dtype, x.device, masked=mask is not None).repeats_heads
        for block in self.model.layers:
            x = block(x, cos, sin, mask, repeats_heads)
        x = self.model.norm(x)
        return self.lm_head(x) if labels is None else self.lm_head(x, labels)

    def _attention(self, dtype: torch.dtype, device: torch.device, *, masked: bool) -> AttentionChoice:
        shape = self.shape
        heads = (shape.num_attention_heads, shape.num_key_value_heads, shape.head_dim)
        return choose(AttentionCase(*heads, dtype, device, masked))

    def describe_attention(self, dtype: torch.dtype, device: torch.device) -> str:
        """The attention kernels that run, in words."""
        plain, masked = (self._attention(dtype, device, masked=masked).kernel for masked in (False, True))
        return plain if plain == masked else f"{plain}; {masked} where a row holds several documents"

    def initial_values(self, name: str, start: int, stop: int, seed: int) -> Tensor:
        """Elements [start, stop) of the flattened parameter `name` before training, fp32.

        Normal with `initializer_range`, ones for norms; a pure function of its arguments, so that weights depend
        neither on world size nor on how parameters are sharded.
        """
        if name.endswith("norm.weight"):
            return torch.ones(stop - start)
        return normal_values(name, start, stop, seed).mul_(self.shape.initializer_range)

    def flops_per_token(self, sequence_length: int) -> float:
        """Multiply-adds counted twice, forward and backward: 6 a matrix parameter, and causal attention once.

        Recomputation is not counted. Source: PaLM (Chowdhery 2022), appendix B, with the causal half.
        """
        shape = self.shape
        embedding = shape.vocab_size * shape.hidden_size
        matrices = sum(math.prod(p.shape) for p in self.parameters() if p.dim() > 1)
        matrices -= 0 if shape.tie_word_embeddings else embedding
        return 6 * matrices + 6 * shape.num_hidden_layers * shape.hidden_size * sequence_length

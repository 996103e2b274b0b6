"""Bytes that autograd keeps of one micro-batch of raydz's decoder between forward and backward, and those of the loss.

Neighbours: `memory.py` adds them to what `zero/` holds. README.md, "Activations", derives the formula; a test compares
it with `torch.autograd.graph.saved_tensors_hooks` on the real model.

Letters: D hidden, K width of keys, F feed-forward, T positions, H heads, E = D / H, V vocabulary, c bytes an element.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydz.config.engine import Recomputation
from raydz.plan.shapes import DecoderSizes


@dataclass(frozen=True)
class Workload:
    """One micro-batch of the decoder.

    Args:
        length: positions of a row.
        recomputes: what backward computes again; "selective" keeps attention and matrix products.
        has_fused_norm: RMSNorm is one kernel that keeps its input alone (CUDA), not normalised values too (CPU).
        repeats_heads: every head gets keys and values of its own, as CUDA's fp32 kernel for masks wants it.
        loss_chunk: positions whose logits exist at once; 0 is all.
    """

    sizes: DecoderSizes
    length: int
    rows: int = 1
    recomputes: Recomputation = "none"
    has_fused_norm: bool = False
    repeats_heads: bool = False
    loss_chunk: int = 0

    @property
    def tokens(self) -> int:
        return self.rows * self.length


def activation_bytes(work: Workload, compute_bytes: int) -> int:
    """What lives at the end of the forward, without the loss, and while backward recomputes one block."""
    c, sizes = compute_bytes, work.sizes
    d, layers = sizes.hidden_size, sizes.num_layers
    rotary = 2 * c * sizes.head_dim
    last = _norm_bytes(work, c)
    whole = _block_bytes(work, c)
    if work.recomputes == "none":
        return work.tokens * (layers * whole + last + rotary)
    mask = work.length  # one byte a pair of positions, kept once
    kept = c * d
    if work.recomputes == "selective":
        kept += c * (4 * d + 2 * sizes.kv_size + 2 * sizes.intermediate_size) + 4 * sizes.num_heads
    return work.tokens * (layers * kept + whole + last + rotary + mask)


def kept_bytes(work: Workload, compute_bytes: int) -> int:
    """`activation_bytes` without the block that is being recomputed."""
    total = activation_bytes(work, compute_bytes)
    return total if work.recomputes == "none" else total - work.tokens * _block_bytes(work, compute_bytes)


def loss_bytes(work: Workload, compute_bytes: int) -> int:
    """What head and loss hold at most, beyond the head's input.

    Whole: log-probabilities, their gradient and the logits' gradient, all fp32. In chunks: the fp32 gradient of the
    weight, and either a chunk's logits or, in backward, the scaled copy of that gradient.
    """
    vocab, c, labels = work.sizes.vocab_size, compute_bytes, 8 * work.tokens
    if not work.loss_chunk:
        return work.tokens * 12 * vocab + labels
    weight = 4 * vocab * work.sizes.hidden_size
    logits = min(work.loss_chunk, work.tokens) * vocab * (8 if c == 4 else c + 8)
    return weight + max(weight, logits) + labels


def _norm_bytes(work: Workload, c: int) -> int:
    """A norm keeps its input, its output (a product's input) and a factor; not fused, fp32 normalised values too."""
    d = work.sizes.hidden_size
    return (2 * c * d if work.has_fused_norm else 8 * d + c * d) + 4


def _block_bytes(work: Workload, c: int) -> int:
    """Two norms; queries, keys, values, mixed values, log-sums and mask of attention; four widths of the SwiGLU."""
    sizes = work.sizes
    keys = sizes.hidden_size if work.repeats_heads else sizes.kv_size
    attention = c * (2 * sizes.hidden_size + 2 * keys + work.length) + 4 * sizes.num_heads
    return 2 * _norm_bytes(work, c) + attention + 4 * c * sizes.intermediate_size

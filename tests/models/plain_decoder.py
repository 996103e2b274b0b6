"""The decoder once more, as slowly and plainly as it can be written: loops over rows, positions and heads, in fp64."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / ((x * x).sum() / x.numel() + eps).sqrt() * weight


def rotated(x: Tensor, position: int, theta: float) -> Tensor:
    """One head's vector (E,) turned: pair (i, i + E/2) by position / theta^(2i/E)."""
    half = x.numel() // 2
    out = [None] * x.numel()
    for i in range(half):
        angle = position * theta ** (-2 * i / x.numel())
        c, s = math.cos(angle), math.sin(angle)
        out[i] = x[i] * c - x[i + half] * s
        out[i + half] = x[i + half] * c + x[i] * s
    return torch.stack(out)


def attention(p: dict[str, Tensor], prefix: str, xs: list[Tensor], positions, documents, shape) -> list[Tensor]:
    heads, kv_heads, size = shape.num_attention_heads, shape.num_key_value_heads, shape.hidden_size
    e = size // heads
    q = [p[prefix + "q_proj.weight"] @ x for x in xs]
    k = [p[prefix + "k_proj.weight"] @ x for x in xs]
    v = [p[prefix + "v_proj.weight"] @ x for x in xs]
    outs = []
    for t in range(len(xs)):
        mixed = []
        for h in range(heads):
            g = h // (heads // kv_heads)
            seen = [s for s in range(t + 1) if documents[s] == documents[t]]
            query = rotated(q[t][h * e : (h + 1) * e], positions[t], shape.rope_theta)
            keys = [rotated(k[s][g * e : (g + 1) * e], positions[s], shape.rope_theta) for s in seen]
            scores = torch.stack([query @ key / math.sqrt(e) for key in keys])
            weights = scores.exp() / scores.exp().sum()
            mixed.append(sum(w * v[s][g * e : (g + 1) * e] for w, s in zip(weights, seen, strict=True)))
        outs.append(p[prefix + "o_proj.weight"] @ torch.cat(mixed))
    return outs


def feed_forward(p: dict[str, Tensor], prefix: str, x: Tensor) -> Tensor:
    gate, up = p[prefix + "gate_proj.weight"] @ x, p[prefix + "up_proj.weight"] @ x
    return p[prefix + "down_proj.weight"] @ (gate / (1 + (-gate).exp()) * up)


def plain_logits(p: dict[str, Tensor], shape, ids: list[int], positions: list[int], documents: list[int]) -> Tensor:
    """Logits (T, vocabulary) of one row; `p` has the decoder's names."""
    eps = shape.rms_norm_eps
    xs = [p["model.embed_tokens.weight"][token] for token in ids]
    for layer in range(shape.num_hidden_layers):
        block = f"model.layers.{layer}."
        normed = [rms_norm(x, p[block + "input_layernorm.weight"], eps) for x in xs]
        added = attention(p, block + "self_attn.", normed, positions, documents, shape)
        xs = [x + a for x, a in zip(xs, added, strict=True)]
        normed = [rms_norm(x, p[block + "post_attention_layernorm.weight"], eps) for x in xs]
        xs = [x + feed_forward(p, block + "mlp.", n) for x, n in zip(xs, normed, strict=True)]
    head = p.get("lm_head.weight", p["model.embed_tokens.weight"])
    return torch.stack([head @ rms_norm(x, p["model.norm.weight"], eps) for x in xs])

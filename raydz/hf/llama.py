"""raydz's decoder and Hugging Face's Llama are one model under one set of names: only the configuration is translated.

Neighbours: `export.py` writes what `derive_config` makes; `folder.py` reads a folder's with `model_section`;
`models/decoder.py` is the decoder. See "Llama" in README.md.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from raydz.errors import CheckpointError
from raydz.hf.source import Source
from raydz.models import DecoderShape

_LAYER = re.compile(r"model\.layers\.(\d+)\.mlp\.gate_proj\.weight")
_EMBED, _QUERY = "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight"
_KEY, _GATE = "model.layers.0.self_attn.k_proj.weight", "model.layers.0.mlp.gate_proj.weight"
_ARCHITECTURE = "LlamaForCausalLM"
_SAME = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
    "rms_norm_eps", "tie_word_embeddings", "initializer_range",
)  # fmt: skip


def config_of_decoder(shape: DecoderShape, max_positions: int) -> dict[str, Any]:
    """The `config.json` under which transformers computes what the decoder computes."""
    return {
        "architectures": [_ARCHITECTURE],
        "model_type": "llama",
        **{name: getattr(shape, name) for name in _SAME},
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "attention_dropout": 0.0,
        "max_position_embeddings": max_positions,
        "rope_theta": shape.rope_theta,  # transformers 4
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},  # transformers 5
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def derive_config(source: Source, *, heads: int | None = None) -> dict[str, Any] | None:
    """The source's own `config.json`, or that of raydz's decoder from its sizes; None where it is another model.

    Args:
        heads: attention heads, which no tensor's shape shows, where the source does not say.

    Raises:
        CheckpointError: it is raydz's decoder, but nobody says how many heads it has.
    """
    if source.config_json is not None:
        return source.config_json
    shapes = {item.name: item.shape for item in source.model_tensors()}
    if not {_EMBED, _QUERY, _KEY, _GATE} <= set(shapes) or f"{_QUERY[:-6]}bias" in shapes:
        return None
    model = source.model
    num_heads = heads or model.get("num_attention_heads")
    if num_heads is None:
        raise CheckpointError(
            "the number of attention heads is not known", where=source.uri, got="weights without a configuration",
            remedy="give --heads, or a config.json with --config",
        )  # fmt: skip
    if not model:
        rope, eps = DecoderShape.rope_theta, DecoderShape.rms_norm_eps
        source.notes.append(f"no configuration: rope_theta {rope:g}, rms_norm_eps {eps:g}")
    shape = _decoder_shape(shapes, num_heads, model, source.uri)
    return config_of_decoder(shape, model.get("max_position_embeddings", 2048))


def _decoder_shape(
    shapes: Mapping[str, tuple[int, ...]], num_heads: int, model: Mapping[str, Any], where: str
) -> DecoderShape:
    hidden = shapes[_EMBED][1]
    if shapes[_QUERY] != (hidden, hidden) or hidden % num_heads or shapes[_KEY][0] % (hidden // num_heads):
        raise CheckpointError(
            "the number of attention heads does not fit", where=where, got=num_heads,
            wanted=f"a divisor of hidden size {hidden} that divides {shapes[_KEY][0]} keys into heads",
        )  # fmt: skip
    return DecoderShape(
        vocab_size=shapes[_EMBED][0],
        hidden_size=hidden,
        num_hidden_layers=1 + max(int(match[1]) for name in shapes if (match := _LAYER.fullmatch(name))),
        num_attention_heads=num_heads,
        num_key_value_heads=shapes[_KEY][0] // (hidden // num_heads),
        intermediate_size=shapes[_GATE][0],
        rope_theta=model.get("rope_theta", DecoderShape.rope_theta),
        rms_norm_eps=model.get("rms_norm_eps", DecoderShape.rms_norm_eps),
        tie_word_embeddings="lm_head.weight" not in shapes,
        initializer_range=model.get("initializer_range", DecoderShape.initializer_range),
    )


def model_section(config: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """raydz's `model` section for a `config.json`, and what of that model raydz's decoder lacks."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    heads, hidden = config.get("num_attention_heads", 0), config.get("hidden_size", 0)
    checks = {
        f"architecture {config.get('architectures')}": _ARCHITECTURE in (config.get("architectures") or []),
        f"activation {config.get('hidden_act')}": config.get("hidden_act", "silu") == "silu",
        "biases": not config.get("attention_bias") and not config.get("mlp_bias"),
        f"rotary scaling {rope.get('rope_type', rope.get('type'))}": rope.get("rope_type", "default") == "default"
        and "type" not in rope
        and "factor" not in rope,
        f"heads of width {config.get('head_dim')}": not config.get("head_dim") or config["head_dim"] * heads == hidden,
    }
    lacking = [what for what, fits in checks.items() if not fits]
    if lacking:
        return {}, lacking
    section = {name: config[name] for name in _SAME if config.get(name) is not None}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    section |= {} if theta is None else {"rope_theta": float(theta)}
    if config.get("max_position_embeddings"):
        section["max_position_embeddings"] = config["max_position_embeddings"]
    return section, []


def with_dtype(config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The configuration of weights that are stored in `dtype`."""
    name = str(dtype).removeprefix("torch.")
    return {**{key: value for key, value in config.items() if key != "torch_dtype"}, "dtype": name, "torch_dtype": name}

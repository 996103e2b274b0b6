"""The model and the loss of a run: raydz's own from the configuration, or people's own from functions.

Neighbours: `setup.py` calls `build_model`; `zero/initialize.py` gives the model its values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from raydz import log
from raydz.config import Config
from raydz.errors import ConfigError
from raydz.models import Decoder, DecoderShape, causal_lm_loss, compile_blocks
from raydz.zero.initialize import unresettable_modules

ModelFunction = Callable[..., nn.Module]
LossFunction = Callable[[Any, dict[str, Any]], Tensor]
"""(engine in the model's place, micro-batch) -> sum over valid tokens."""

_logger = log.get(__name__)


def decoder_shape(config: Config, vocab_size: int) -> DecoderShape:
    """Sizes of raydz's decoder, with what is `auto` filled in."""
    model = config.model
    intermediate = model.intermediate_size
    if intermediate == "auto":
        intermediate = -(-8 * model.hidden_size // 3 // 64) * 64
    return DecoderShape(
        vocab_size=vocab_size if model.vocab_size == "auto" else model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.num_hidden_layers,
        num_attention_heads=model.num_attention_heads,
        num_key_value_heads=model.num_key_value_heads or model.num_attention_heads,
        intermediate_size=intermediate,
        rope_theta=model.rope_theta,
        rms_norm_eps=model.rms_norm_eps,
        tie_word_embeddings=model.tie_word_embeddings,
        initializer_range=model.initializer_range,
        activation_checkpointing=model.activation_checkpointing,
        loss_chunk_tokens=config.train.loss_chunk_tokens,
    )


def build_model(config: Config, vocab_size: int, function: ModelFunction | None) -> nn.Module:
    """The model without values where possible, so that no rank holds more than a unit of it.

    Args:
        function: builds people's own model; called with the configuration if it needs an argument or has one named
            `config`. It runs under `torch.device("meta")`; a model with modules that cannot be reset is built for
            real on every rank.

    Raises:
        ConfigError: the function does not return a module.
    """
    if function is None:
        with torch.device("meta"):
            decoder = Decoder(decoder_shape(config, vocab_size))
        if config.model.compile:
            compile_blocks(decoder, config.model.compile_backend)
        return decoder
    arguments = (config,) if _wants_config(function) else ()
    with torch.device("meta"):
        model = _checked(function(*arguments))
    stuck = unresettable_modules(model)
    if not stuck or hasattr(model, "initial_values"):
        return model
    _logger.warning(
        "%s has no reset_parameters(), so every rank builds the whole model on its host before it is sharded", stuck[0]
    )
    torch.manual_seed(config.run.seed)
    return _checked(function(*arguments))


def _wants_config(function: ModelFunction) -> bool:
    """Arguments with defaults, such as those of a module's class, are people's own business."""
    named = [
        p
        for p in inspect.signature(function).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return any(p.default is p.empty or p.name == "config" for p in named)


def _checked(model: Any) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise ConfigError("the model function returned no module", got=type(model).__name__, wanted="torch.nn.Module")
    return model


def choose_loss(function: LossFunction | None) -> LossFunction:
    """The given loss, or next-token prediction."""
    return function or causal_lm_loss

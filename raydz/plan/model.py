"""What a configuration, or a few sizes on the command line, say about the model.

Neighbours: `shapes.py` turns the sizes into parameters; `cli/main.py` reads the sizes; `train/memory.py` has a real
model instead. What is `auto` is filled in as in `train/build.py`, and a test compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from raydz.config import Config, ModelConfig
from raydz.errors import ConfigError
from raydz.plan.activations import Workload
from raydz.plan.estimate import Planner
from raydz.plan.shapes import DecoderSizes, decoder_units

_VOCABULARY = 32_000
_LAYER_WIDTH = 128  # hidden size of a model ~ 128 times its layers, from 100M to 100B parameters
_WIDTH_STEP = 16
_LOSS_CHUNK = 2048


@dataclass(frozen=True)
class Outline:
    """Sizes that stand for a `model` section; None is what the file says, or what follows from the others."""

    params: float | None = None
    layers: int | None = None
    hidden: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    intermediate: int | None = None
    vocab: int | None = None

    @property
    def is_empty(self) -> bool:
        return all(value is None for value in vars(self).values())


def with_outline(config: Config, outline: Outline) -> Config:
    """The configuration with the outline in its `model` section.

    Raises:
        ConfigError: the sizes do not fit together, or neither file nor outline describes a model.
    """
    if outline.is_empty:
        if not config.given.get("model"):
            raise ConfigError(
                "nothing says how large the model is", where="model", got="no section, no sizes",
                remedy="add a model section, or --params 7e9 --layers 32 --hidden 4096",
            )  # fmt: skip
        return config
    return _with_model(config, _changes(config, outline))


def _with_model(config: Config, changes: dict[str, Any]) -> Config:
    try:
        model = ModelConfig.model_validate({**config.given.get("model", {}), **changes})
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError("the model's sizes do not fit together", where="model", got=first["msg"]) from None
    return config.model_copy(update={"model": model})


def _changes(config: Config, outline: Outline) -> dict[str, Any]:
    given = config.given.get("model", {})
    layers, hidden, vocab = outline.layers, outline.hidden, outline.vocab
    if vocab is None and "vocab_size" not in given and "tokenizer" not in config.given.get("data", {}):
        vocab = _VOCABULARY
    if outline.params is not None:
        tables = 2 * (vocab or decoder_sizes(config).vocab_size)
        hidden = hidden or given.get("hidden_size") or _width_of(outline.params, tables, layers)
        rest = max(0.0, outline.params - tables * hidden)
        layers = layers or given.get("num_hidden_layers") or max(1, round(rest / (12 * hidden * hidden)))
    heads = outline.heads
    if heads is None and hidden is not None and "num_attention_heads" not in given:
        heads = next((hidden // width for width in (128, 64, 32, 16) if hidden % width == 0), None)
    changes = {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": outline.kv_heads,
        "intermediate_size": outline.intermediate,
        "vocab_size": vocab,
    }
    if outline.params is not None and outline.intermediate is None:
        changes["intermediate_size"] = _intermediate(config, outline, changes)
    return {name: value for name, value in changes.items() if value is not None}


def _width_of(params: float, tables: int, layers: int | None) -> int:
    """The largest hidden size for so many parameters: `tables` rows, 12 D² a layer, D / 128 layers if not given."""
    width = _LAYER_WIDTH
    while True:
        larger = width + _LAYER_WIDTH
        if tables * larger + 12 * larger * larger * (layers or larger / _LAYER_WIDTH) > params:
            return width
        width = larger


def _intermediate(config: Config, outline: Outline, changes: dict[str, Any]) -> int:
    """The feed-forward width that brings the model to `outline.params`."""
    known = {name: value for name, value in changes.items() if value is not None}
    sizes = decoder_sizes(_with_model(config, known | {"intermediate_size": 1}))
    each = 3 * sizes.num_layers * sizes.hidden_size
    assert outline.params is not None
    width = round((outline.params - sizes.numel + each) / each / _WIDTH_STEP) * _WIDTH_STEP
    if width < _WIDTH_STEP:
        raise ConfigError(
            "so few parameters leave nothing for the feed-forward parts", where="--params", got=f"{outline.params:.3g}",
            wanted=f"more than {sizes.numel - each:.3g}, which attention and vocabulary take",
            remedy="fewer --layers, a smaller --hidden or --vocab",
        )  # fmt: skip
    return width


def decoder_sizes(config: Config, vocab_size: int | None = None) -> DecoderSizes:
    """Sizes of raydz's decoder.

    Args:
        vocab_size: the tokenizer's, where it is known.

    Raises:
        ConfigError: the vocabulary is that of a tokenizer file, which is not read here.
    """
    model = config.model
    vocab = model.vocab_size if model.vocab_size != "auto" else vocab_size
    if vocab is None:
        if config.data.tokenizer.path is not None:
            raise ConfigError(
                "the vocabulary's size is not known", where="model.vocab_size", got="auto, with data.tokenizer.path",
                remedy="set model.vocab_size, or --vocab",
            )  # fmt: skip
        vocab = config.data.tokenizer.vocab_size
    intermediate = model.intermediate_size
    if intermediate == "auto":
        intermediate = -(-8 * model.hidden_size // 3 // 64) * 64
    return DecoderSizes(
        vocab_size=vocab,
        hidden_size=model.hidden_size,
        num_layers=model.num_hidden_layers,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads or model.num_attention_heads,
        intermediate_size=intermediate,
        is_tied=model.tie_word_embeddings,
    )


def decoder_planner(config: Config, device: str, vocab_size: int | None = None) -> Planner:
    """The planner of a run that trains raydz's decoder on "cpu" or "cuda".

    Raises:
        ConfigError: as `decoder_sizes`; or a pattern of `parallel` matches no module.
    """
    sizes = decoder_sizes(config, vocab_size)
    units = decoder_units(sizes, config.parallel.units, config.parallel.fp32_modules or ())
    work = workload(config, sizes, device)
    return Planner(
        config, units, work, device, keeps_average=config.train.ema_decay is not None,
        saves_behind=config.checkpoint.saves_behind,
    )  # fmt: skip


def workload(config: Config, sizes: DecoderSizes, device: str) -> Workload:
    """A row of the run's micro-batch; the planner sets the rows."""
    chunk = config.train.loss_chunk_tokens
    # As `models/head.py`: gradients made in the forward would miss the loss scale of fp16.
    automatic = 0 if config.compute_dtype == "fp16" else min(sizes.hidden_size, _LOSS_CHUNK)
    recomputes = config.model.activation_checkpointing
    return Workload(
        sizes=sizes,
        length=config.data.sequence_length,
        recomputes=config.parallel.activation_checkpointing if recomputes == "none" else recomputes,
        has_fused_norm=device == "cuda",
        repeats_heads=device == "cuda" and config.compute_dtype == "fp32",
        loss_chunk=automatic if chunk == "auto" else chunk,
    )

"""Names, shapes, units and sizes that the plan counts are those of the real model and the real engine."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from raydz.config import ZeroConfig, load
from raydz.errors import ConfigError
from raydz.models import Decoder, DecoderShape
from raydz.plan.groups import cut_groups, engine_sizes, padded_numel
from raydz.plan.model import decoder_sizes
from raydz.plan.shapes import DecoderSizes, ParameterShape, UnitShape, decoder_parameters, decoder_units
from raydz.train.build import decoder_shape
from raydz.zero import GroupLayout, ParameterSpec, UnitSpec, ZeroOptions, find_units
from raydz.zero.layout import split_by_numel

SIZES = [
    DecoderSizes(100, 32, 2, 4, 2, 48),
    DecoderSizes(100, 32, 2, 4, 4, 48, is_tied=True),
    DecoderSizes(64, 48, 12, 6, 1, 80),
]


def model_of(sizes: DecoderSizes) -> Decoder:
    with torch.device("meta"):
        return Decoder(
            DecoderShape(
                sizes.vocab_size, sizes.hidden_size, sizes.num_layers, sizes.num_heads, sizes.num_kv_heads,
                sizes.intermediate_size, tie_word_embeddings=sizes.is_tied,
            )
        )  # fmt: skip


@pytest.mark.parametrize("sizes", SIZES)
def test_parameters_are_those_of_the_torch_model_in_its_order(sizes: DecoderSizes) -> None:
    ours = [(p.name, p.shape) for p in decoder_parameters(sizes)]
    assert ours == [(name, tuple(p.shape)) for name, p in model_of(sizes).named_parameters()]
    assert sizes.numel == sum(p.numel() for p in model_of(sizes).parameters())


@pytest.mark.parametrize("patterns", [None, ["model.layers.*.mlp"], ["model.layers.1", "lm_head"], ["model"]])
@pytest.mark.parametrize("sizes", SIZES)
def test_units_are_those_that_the_engine_finds(sizes: DecoderSizes, patterns: list[str] | None) -> None:
    if patterns and sizes.is_tied and "lm_head" in patterns:
        patterns = ["model.layers.1"]
    found = find_units(model_of(sizes), patterns)
    ours = decoder_units(sizes, patterns)
    assert [unit.name for unit in ours] == [unit.name for unit in found]
    assert [[p.name for p in unit.parameters] for unit in ours] == [
        [spec.name for spec in unit.parameters] for unit in found
    ]
    assert [unit.is_lookup for unit in ours] == [unit.is_lookup for unit in found]


def test_a_pattern_that_matches_nothing_is_refused_by_name() -> None:
    for key, error in ((["blocks.*"], "parallel.units"), (["rooter"], "parallel.fp32_modules")):
        with pytest.raises(ConfigError, match=error):
            decoder_units(SIZES[0], key) if error == "parallel.units" else decoder_units(SIZES[0], None, key)


def test_modules_that_stay_fp32_take_four_bytes_each() -> None:
    units = decoder_units(SIZES[0], None, ["*norm"])
    wide = {p.name for unit in units for p in unit.parameters if p.compute_bytes == 4}
    assert wide == {name for name, _ in model_of(SIZES[0]).named_parameters() if "norm" in name}


shapes = st.lists(st.integers(0, 400), min_size=1, max_size=12)


@given(shapes, st.integers(1, 5))
def test_padding_is_that_of_the_engines_layout(numels: list[int], ranks: int) -> None:
    layout = GroupLayout.of([(str(i), (n,)) for i, n in enumerate(numels)], ranks)
    assert padded_numel(numels, ranks) == layout.padded_numel


@given(shapes, st.integers(1, 500), st.integers(1, 4), st.integers(0, 200), st.sampled_from([0, 2, 3]))
def test_groups_are_those_that_the_engine_builds(
    numels: list[int], bucket: int, ranks: int, persistence: int, stage: int
) -> None:
    zero = ZeroConfig(reduce_bucket_size=bucket, stage3_param_persistence_threshold=persistence)
    unit = UnitShape("", tuple(ParameterShape(str(i), (n,)) for i, n in enumerate(numels)))
    wanted = []
    for persistent in (False, True):
        members = [n for n in numels if (stage == 3 and n < persistence) == persistent]
        for run in split_by_numel(members, bucket):
            layout = GroupLayout.of([(str(i), (members[i],)) for i in run], ranks)
            wanted.append((layout.padded_numel, layout.shard_numel, persistent))
    groups = cut_groups([unit], engine_sizes(zero, [unit]), stage=stage, ranks=ranks)
    assert [(g.padded_numel, g.shard_numel, g.persistent) for g in groups] == wanted


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 10**9), min_size=1, max_size=6),
    st.none() | st.integers(0, 10**6), st.none() | st.integers(0, 10**6), st.none() | st.integers(1, 10**6),
)  # fmt: skip
def test_sizes_that_are_not_given_scale_as_the_engines_do(numels, prefetch, persistence, bucket) -> None:
    zero = ZeroConfig(
        stage3_prefetch_bucket_size=prefetch, stage3_param_persistence_threshold=persistence, reduce_bucket_size=bucket
    )
    units = [UnitShape(str(i or ""), (ParameterShape("p", (n,)),)) for i, n in enumerate(numels)]
    specs = [
        UnitSpec(unit.name, nn.Identity(), [ParameterSpec("p", nn.Parameter(torch.empty(n, device="meta")), [])])
        for unit, n in zip(units, numels, strict=True)
    ]
    wanted = ZeroOptions(
        bucket_numel=bucket, prefetch_numel=prefetch, persistence_numel=persistence,
        max_live_numel=zero.stage3_max_live_parameters,
    ).resolved(specs)  # fmt: skip
    ours = engine_sizes(zero, units)
    assert vars(ours) == {name: getattr(wanted, name) for name in vars(ours)}


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["model.hidden_size=96", "model.num_attention_heads=6", "model.num_key_value_heads=2"],
        ["model.intermediate_size=100", "model.tie_word_embeddings=true", "model.vocab_size=5000"],
        ["data.tokenizer.vocab_size=4096"],
    ],
)
def test_what_is_auto_is_filled_in_as_the_training_does(overrides: list[str]) -> None:
    config = load({"model": {"num_hidden_layers": 3}, "train_batch_size": 4}, overrides)
    vocab = config.data.tokenizer.vocab_size
    real, ours = decoder_shape(config, vocab), decoder_sizes(config)
    assert ours == DecoderSizes(
        real.vocab_size, real.hidden_size, real.num_hidden_layers, real.num_attention_heads, real.num_key_value_heads,
        real.intermediate_size, real.tie_word_embeddings,
    )  # fmt: skip


def test_the_vocabulary_of_a_tokenizer_file_must_be_said() -> None:
    config = load({"model": {"hidden_size": 64}, "data": {"tokenizer": {"path": "t.json"}}, "train_batch_size": 4})
    with pytest.raises(ConfigError, match="vocab_size"):
        decoder_sizes(config)
    assert decoder_sizes(config, 777).vocab_size == 777

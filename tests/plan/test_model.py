"""Sizes on the command line stand for a model section."""

from __future__ import annotations

import pytest

from raydz.config import Config, load
from raydz.errors import ConfigError
from raydz.plan import Outline, decoder_sizes, with_outline


def sizes_of(outline: Outline, source: dict | None = None):
    config: Config = load({"train_batch_size": 8} | (source or {}))
    return decoder_sizes(with_outline(config, outline))


@pytest.mark.parametrize("params", [1.2e8, 1e9, 7e9, 7e10, 2e11])
def test_a_number_of_parameters_alone_gives_a_model_of_so_many(params: float) -> None:
    sizes = sizes_of(Outline(params=params))
    assert sizes.numel == pytest.approx(params, rel=0.01)
    assert 1 < sizes.intermediate_size / sizes.hidden_size < 6
    assert sizes.vocab_size == 32_000


def test_given_sizes_are_kept_and_the_feed_forward_takes_the_rest() -> None:
    sizes = sizes_of(Outline(params=7e9, layers=32, hidden=4096))
    assert (sizes.num_layers, sizes.hidden_size, sizes.head_dim) == (32, 4096, 128)
    assert sizes.numel == pytest.approx(7e9, rel=0.001)


def test_every_size_may_be_given_and_then_parameters_follow() -> None:
    sizes = sizes_of(Outline(layers=2, hidden=64, heads=4, kv_heads=2, intermediate=100, vocab=50))
    attention, norms = 64 * 64 * 2 + 2 * 64 * 32, 2 * 64
    assert sizes.numel == 2 * 50 * 64 + 64 + 2 * (attention + norms + 3 * 64 * 100)


def test_an_outline_changes_the_files_model_section_and_leaves_the_rest() -> None:
    source = {"model": {"hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 300, "tie_word_embeddings": True}}
    sizes = sizes_of(Outline(layers=5), source)
    assert (sizes.num_layers, sizes.hidden_size, sizes.vocab_size, sizes.is_tied) == (5, 64, 300, True)
    assert sizes_of(Outline(), source).num_layers == 3


def test_a_tokenizer_in_the_file_gives_the_vocabulary() -> None:
    source = {"data": {"tokenizer": {"vocab_size": 5000}}}
    assert sizes_of(Outline(params=1e9), source).vocab_size == 5000


@pytest.mark.parametrize(
    ("outline", "said"),
    [
        (Outline(), "how large the model is"),
        (Outline(params=1e6), "leave nothing"),
        (Outline(hidden=64, heads=5), "do not fit together"),
    ],
)
def test_sizes_that_make_no_model_are_refused(outline: Outline, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        sizes_of(outline)

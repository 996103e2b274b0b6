"""The batch triangle against a brute-force search for sizes that close."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.config import BatchSize, load_engine, resolve_batch
from raydz.errors import ConfigError

MAYBE = st.none() | st.integers(1, 24)


def brute_force(total: int | None, micro: int | None, accumulation: int | None, ranks: int) -> BatchSize | None:
    """DeepSpeed's rule by trying everything: the sizes that close and agree with what is given."""
    if total is None and micro is None:
        return None
    if accumulation is None and (total is None or micro is None):
        accumulation = 1
    closing = [
        BatchSize(m * a * ranks, m, a)
        for m in range(1, 25)
        for a in range(1, 25)
        if micro in (None, m) and accumulation in (None, a) and total in (None, m * a * ranks)
    ]
    assert len(closing) <= 1
    return closing[0] if closing else None


@given(MAYBE, MAYBE, MAYBE, st.integers(1, 5))
def test_triangle_is_the_only_one_that_closes_or_an_error(total, micro, accumulation, ranks):
    expected = brute_force(total, micro, accumulation, ranks)
    if expected is None:
        with pytest.raises(ConfigError):
            resolve_batch(total, micro, accumulation, ranks)
    else:
        assert resolve_batch(total, micro, accumulation, ranks) == expected


def test_article_file_is_right_for_8_ranks_and_says_what_is_wrong_for_2(configs):
    article = load_engine(configs / "article_zero3.json")
    assert article.batch(8) == BatchSize(global_batch=1024, micro_batch=8, accumulation=16)
    with pytest.raises(ConfigError) as caught:
        article.batch(2)
    text = str(caught.value)
    for part in ("train_batch_size 1024", "per_gpu 8", "steps 16", "8 * 16 * 2 ranks = 256"):
        assert part in text
    for change in ("train_batch_size 256", "per_gpu 32", "steps 64", "8 ranks"):
        assert change in caught.value.remedy


def test_a_change_that_would_not_divide_is_not_proposed():
    with pytest.raises(ConfigError) as caught:
        resolve_batch(10, 4, 1, 2)
    assert "train_batch_size 8" in caught.value.remedy
    assert "gradient_accumulation_steps" not in caught.value.remedy


@pytest.mark.parametrize(("total", "micro", "accumulation"), [(15, None, None), (15, 4, None), (15, None, 2)])
def test_a_batch_that_ranks_do_not_divide_names_the_nearest_ones(total, micro, accumulation):
    with pytest.raises(ConfigError) as caught:
        resolve_batch(total, micro, accumulation, 2)
    assert "16" in caught.value.remedy and "2 ranks" in str(caught.value)


@pytest.mark.parametrize("sizes", [(0, None, None, 1), (None, -1, None, 1), (8, None, 0, 1), (8, None, None, 0)])
def test_sizes_below_one_are_refused(sizes):
    with pytest.raises(ConfigError, match="at least 1"):
        resolve_batch(*sizes)

"""Random numbers by address: slices equal the whole, and the whole is normal."""

from __future__ import annotations

import hashlib
import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.models import init
from raydz.models.init import normal_values

CUTS = st.lists(st.integers(0, 200), min_size=2, max_size=8).map(sorted)


@given(cuts=CUTS, seed=st.integers(0, 2**40))
@settings(max_examples=50)
def test_slices_are_parts_of_the_whole(cuts: list[int], seed: int) -> None:
    whole = normal_values("w", cuts[0], cuts[-1], seed)
    parts = [normal_values("w", low, high, seed) for low, high in itertools.pairwise(cuts)]
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("chunk", [1, 3, 4, 64])
def test_the_size_of_a_chunk_does_not_show(monkeypatch, chunk: int) -> None:
    whole = normal_values("w", 5, 150, 0)
    monkeypatch.setattr(init, "_CHUNK", chunk)
    assert torch.equal(normal_values("w", 5, 150, 0), whole)


def test_far_elements_are_reached_without_making_the_near_ones() -> None:
    first = normal_values("w", 10**12, 10**12 + 3, 0)
    assert torch.equal(first, normal_values("w", 10**12 - 5, 10**12 + 3, 0)[5:])


def test_moments_are_those_of_the_standard_normal() -> None:
    n = 400_000
    values = normal_values("w", 0, n, 7).double()
    # Standard errors of the first four moments are 1, sqrt 2, sqrt 15, sqrt 96 over sqrt n; five of them are allowed.
    for power, wanted, spread in ((1, 0, 1), (2, 1, math.sqrt(2)), (3, 0, math.sqrt(15)), (4, 3, math.sqrt(96))):
        assert abs(float((values**power).mean()) - wanted) < 5 * spread / math.sqrt(n), power
    for lag in (1, 2, 3, 4):  # neighbours come from one count of the counter
        assert abs(float((values[lag:] * values[:-lag]).mean())) < 5 / math.sqrt(n)
    assert float((values.abs() < 1).double().mean()) == pytest.approx(0.6827, abs=0.004)


def test_names_and_seeds_give_numbers_of_their_own() -> None:
    vectors = [normal_values(name, 0, 1000, seed) for name in ("a", "b", "ab") for seed in (0, 1, 10)]
    for i, left in enumerate(vectors):
        for right in vectors[i + 1 :]:
            assert abs(float((left * right).mean())) < 5 / math.sqrt(1000)


def test_values_are_box_muller_of_philox_words() -> None:
    """Written out for the first count, so that a release which draws other numbers is seen."""
    key = int.from_bytes(hashlib.blake2b(b"5/w", digest_size=16).digest(), "little")
    words = [int(word) for word in np.random.Philox(key=key).random_raw(4)]
    wanted = [
        math.sqrt(-2 * math.log(((word >> 32) + 1) / 2**32)) * math.cos(2 * math.pi * (word % 2**32) / 2**32)
        for word in words
    ]
    assert normal_values("w", 0, 4, 5).tolist() == pytest.approx(wanted, rel=2**-23)


def test_no_word_gives_infinity() -> None:
    assert normal_values("w", 3, 3, 0).shape == (0,)
    assert normal_values("w", 0, 100_000, 1).isfinite().all()

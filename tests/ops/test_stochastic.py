"""Rounding by chance: unbiased, to a neighbour only, and a function of (seed, step, name, element) alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from raydz.errors import LayoutError
from raydz.ops.stochastic import LANES, noise_key, random_words, round_stochastic

CPU = torch.device("cpu")


def splitmix64(key: int, count: int) -> list[int]:
    """The published generator in Python integers."""
    mask, words, state = (1 << 64) - 1, [], key
    for _ in range(count):
        state = (state + 0x9E3779B97F4A7C15) & mask
        z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & mask
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
        words.append(z ^ (z >> 31))
    return words


def rounded(source: torch.Tensor, key: int = 1, lane: int = 0) -> torch.Tensor:
    out = torch.empty(source.numel(), dtype=torch.bfloat16)
    round_stochastic(source, random_words(key, 0, source.numel(), CPU), lane, out)
    return out


@pytest.mark.parametrize("key", [0, 1234567, (1 << 64) - 5])
def test_words_are_splitmix64s(key: int) -> None:
    found = [word % (1 << 64) for word in random_words(key, 0, 50, CPU).tolist()]
    assert found == splitmix64(key, 50)


def test_the_published_first_words() -> None:
    # Of seed 1234567, as the reference implementation prints them.
    assert [w % (1 << 64) for w in random_words(1234567, 0, 2, CPU).tolist()] == [
        6457827717110365317, 3203168211198807973,
    ]  # fmt: skip


@pytest.mark.parametrize("cut", [0, 1, 37, 99, 100])
def test_a_slice_has_the_words_of_the_whole(cut: int) -> None:
    parts = [random_words(7, 0, cut, CPU), random_words(7, cut, 100, CPU)]
    assert torch.equal(torch.cat(parts), random_words(7, 0, 100, CPU))


def test_elements_beyond_32_bits_have_words_of_their_own() -> None:
    assert not torch.equal(random_words(7, 1 << 33, (1 << 33) + 50, CPU), random_words(7, 0, 50, CPU))


def test_seed_step_and_name_each_give_another_key() -> None:
    assert len({noise_key(s, t, n) for s in (0, 1) for t in (1, 11) for n in ("a", "b", "1/a")}) == 12


@pytest.mark.parametrize("lane", range(LANES))
@pytest.mark.parametrize("share", [1 / 65536, 0.1, 0.5, 0.9, 65535 / 65536])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_of_many_is_the_value(share: float, sign: float, lane: int) -> None:
    count, ulp = 1 << 16, 2.0**-7  # of bf16 between 1 and 2
    value = sign * (1 + ulp * np.float32(share))
    found = rounded(torch.full((count,), value, dtype=torch.float32), key=lane, lane=lane).double()
    assert {abs(v) for v in found.tolist()} <= {1.0, 1 + ulp}
    deviation = ulp * (share * (1 - share) / count) ** 0.5
    assert abs(float(found.mean()) - float(np.float32(value))) <= 5 * deviation


def test_lanes_are_independent() -> None:
    half = torch.full((1 << 16,), 1 + 2.0**-8)
    ups = torch.stack([rounded(half, lane=lane) > 1 for lane in range(LANES)]).double()
    worst = (torch.corrcoef(ups) - torch.eye(LANES)).abs().max()
    assert worst < 5 / 2**8  # five deviations of a correlation of 2^16 pairs


def test_what_bf16_has_stays() -> None:
    values = torch.tensor([0.0, -0.0, 1.0, -2.5, 2.0**-133, 3.3895e38]).bfloat16()
    assert rounded(values.float()).view(torch.int16).tolist() == values.view(torch.int16).tolist()


def test_what_is_not_finite_stays_what_it_is() -> None:
    source = torch.tensor([float("inf"), -float("inf"), float("nan")] * 50)
    source[2::3].view(torch.int32).copy_(
        torch.full((50,), 0x7F800001, dtype=torch.int32)
    )  # a NaN that truncates to inf
    found = rounded(source).float()
    assert found[0::3].eq(float("inf")).all() and found[1::3].eq(-float("inf")).all() and found[2::3].isnan().all()


@pytest.mark.parametrize("out", [torch.empty(3), torch.empty(2, dtype=torch.bfloat16)])
def test_a_buffer_that_does_not_fit_is_refused(out: torch.Tensor) -> None:
    with pytest.raises(LayoutError, match="out"):
        round_stochastic(torch.zeros(3), random_words(0, 0, 3, CPU), 0, out)

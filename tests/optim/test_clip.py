"""Norms by exact arithmetic, and the factor that clips."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.optim import clip_scale, combine_norms

SQUARES = st.floats(0, 1e150, allow_nan=False, allow_infinity=False)


@given(st.lists(SQUARES, max_size=6))
def test_the_norm_is_the_root_of_the_sum_to_24_bits(parts: list[float]) -> None:
    norm = combine_norms(parts)
    exact = sum((Fraction(part) for part in parts), Fraction(0))
    # Half a unit of 24 bits, and a few of the 53 that sum and root rounded before.
    low, high = (Fraction(norm) * (1 + sign * (Fraction(1, 2**24) + Fraction(1, 2**48))) for sign in (-1, 1))
    assert low**2 <= exact <= high**2 or (exact < Fraction(1, 10**300) and norm < 1e-150)


@given(st.lists(SQUARES, max_size=6))
def test_the_norm_has_24_bits(parts: list[float]) -> None:
    mantissa, _ = math.frexp(combine_norms(parts))
    assert (mantissa * 2**24).is_integer()


@pytest.mark.parametrize("parts", [[0.1, 0.2, 0.3], [1e16, 1.0, 1.0, -0.0], [7.0, 1e-9, 3.0]])
def test_the_order_of_ranks_does_not_show(parts: list[float]) -> None:
    assert combine_norms(parts) == combine_norms(parts[::-1])


def test_known_norms() -> None:
    assert combine_norms([9.0, 16.0]) == 5.0
    assert combine_norms([]) == 0.0
    assert combine_norms([1e77, 3e77]) == pytest.approx(2e38 * math.sqrt(10), rel=2**-24)  # fp32 squares overflow
    assert combine_norms([1.0 + 2**-40]) == 1.0


@pytest.mark.parametrize(
    ("parts", "wanted"),
    [
        ([1.0, math.inf], math.inf),
        ([math.nan, 1.0], math.nan),
        ([math.inf, math.nan], math.nan),
        ([math.inf, -math.inf], math.nan),
        ([1e308, 1e308], math.inf),
    ],
)
def test_what_is_not_finite_stays_so(parts: list[float], wanted: float) -> None:
    assert combine_norms(parts) == pytest.approx(wanted, nan_ok=True)


@pytest.mark.parametrize(
    ("norm", "max_norm", "wanted"),
    [
        (0.5, 1.0, 1.0),
        (1.0, 1.0, 1.0),
        (4.0, 1.0, 1.0 / 4.000001),
        (4.0, 0.0, 1.0),
        (1e30, 0.0, 1.0),
        (0.0, 1.0, 1.0),
        (3e38, 1.5, 5e-39),
    ],
)
def test_gradients_above_the_limit_are_scaled_to_it(norm: float, max_norm: float, wanted: float) -> None:
    assert clip_scale(norm, max_norm) == pytest.approx(wanted, rel=1e-12)

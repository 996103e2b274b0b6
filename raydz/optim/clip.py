"""Global gradient norm and the factor that clips it. Pure arithmetic on host numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable


def combine_norms(sums_of_squares: Iterable[float]) -> float:
    """Square root of the sum, in the order given, in fp64, rounded to fp32's 24 bits.

    NaN or inf where a part is not finite. Other layouts add the squares in another order and differ in the last of
    53 bits; the rounding makes the norm, and so the clip factor, the same for all (but for one step in about 1e8).
    """
    total = 0.0
    for part in sums_of_squares:
        total += part
    if not 0 <= total < math.inf:
        return math.nan if math.isnan(total) or total < 0 else math.inf
    mantissa, exponent = math.frexp(math.sqrt(total))
    return math.ldexp(round(mantissa * 2**24) / 2**24, exponent)


def clip_scale(norm: float, max_norm: float) -> float:
    """Factor for all gradients: `max_norm / (norm + 1e-6)` where the norm is above, else 1; 0 means no clipping."""
    if max_norm <= 0 or norm <= max_norm:
        return 1.0
    return max_norm / (norm + 1e-6)

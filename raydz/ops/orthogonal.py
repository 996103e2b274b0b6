"""Nearly orthogonal matrices by Newton-Schulz iterations, for Muon. Layer 2. Above: `raydz.optim.muon`.

Both methods replace every singular value s of the normalised matrix by f(f(...f(s))), f(s) = as + bs^3 + cs^5, which
drives it to between 0.7 and 1.2. README.md, "Newton-Schulz", compares them.
"""

from __future__ import annotations

import torch
from torch import Tensor

A, B, C = 3.4445, -4.7750, 2.0315
_RESTART = 2  # after two steps the products of polynomials are applied, and begin anew: rounding stays small
_SMALLEST_NORM = 1e-7


@torch.no_grad()
def orthogonalise(matrix: Tensor, *, method: str, steps: int) -> Tensor:
    """U f(S) V' of a matrix U S V', f iterated `steps` times.

    Shape: (rows, columns), as the result. Dtype: `standard` computes and returns bf16; `gram` computes in fp32 on a
    CPU, in fp16 elsewhere, and returns fp32.

    Source: https://kellerjordan.github.io/posts/muon/ and https://tridao.me/blog/2026/gram-newton-schulz/
    """
    if not matrix.numel():
        return matrix
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    out = _standard(x, steps) if method == "standard" else _gram(x, steps)
    return out.T if is_tall else out


def _standard(x: Tensor, steps: int) -> Tensor:
    # As torch.optim.Muon: cast, then normalise.
    x = x.to(torch.bfloat16)
    return _iterate(x / x.norm().clamp(min=_SMALLEST_NORM), steps)


def _iterate(x: Tensor, steps: int) -> Tensor:
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x


def _gram(x: Tensor, steps: int) -> Tensor:
    """The polynomials are multiplied as small square matrices, and meet the long one only at the end of a stage."""
    x = x.to(torch.float32)
    x = x / x.norm().clamp(min=_SMALLEST_NORM)  # before the cast: fp16 overflows at 65504
    if x.device.type != "cpu":
        x = x.to(torch.float16)
    if x.shape[0] == x.shape[1]:
        return _iterate(x, steps).to(torch.float32)
    for stage in (min(steps, _RESTART), steps - min(steps, _RESTART)):
        if stage:
            x = _polynomials(x @ x.T, stage) @ x
    return x.to(torch.float32)


def _polynomials(gram: Tensor, steps: int) -> Tensor:
    """The product of the next `steps` polynomials in `gram` = X X'."""
    product = None
    for index in range(steps):
        polynomial = torch.addmm(gram, gram, gram, beta=B, alpha=C)
        polynomial.diagonal().add_(A)
        product = polynomial if product is None else polynomial @ product
        if index + 1 < steps:
            gram = polynomial @ gram @ polynomial
    assert product is not None
    return product

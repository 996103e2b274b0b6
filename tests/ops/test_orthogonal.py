"""Newton-Schulz iterations against polynomials of exact singular values, and against torch's Muon."""

from __future__ import annotations

import pytest
import torch

from raydz.ops.orthogonal import orthogonalise
from tests.optim.references import exact_orthogonal

SHAPES = [(5, 5), (3, 8), (8, 3), (1, 6), (6, 1), (1, 1), (24, 64)]


def matrix(shape: tuple[int, int], scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("steps", [1, 2, 3, 5])
def test_gram_iterates_the_polynomial_on_singular_values(shape, steps: int) -> None:
    # A singular value's error grows by at most 3.4445 a step, from a few ulps of fp32.
    wanted = exact_orthogonal(matrix(shape), steps)
    found = orthogonalise(matrix(shape), method="gram", steps=steps)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=8 * 2**-24 * 3.4445**steps)


@pytest.mark.parametrize("shape", SHAPES)
def test_standard_has_the_bits_of_torch(shape) -> None:
    weight = torch.nn.Parameter(torch.zeros(shape))
    weight.grad = matrix(shape)
    torch.optim.Muon([weight], lr=1.0, momentum=0.0, nesterov=False, weight_decay=0.0, adjust_lr_fn=None).step()
    found = orthogonalise(matrix(shape), method="standard", steps=5)
    scale = max(1, shape[0] / shape[1]) ** 0.5
    torch.testing.assert_close(-found.float() * scale, weight.detach(), rtol=2**-22, atol=0)


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_size_of_the_gradient_does_not_matter(method: str) -> None:
    small, large = (orthogonalise(matrix((4, 9), scale), method=method, steps=5) for scale in (2.0**-10, 2.0**40))
    assert torch.equal(small, large)


@pytest.mark.parametrize("method", ["gram", "standard"])
def test_zeros_stay_zeros_and_nothing_stays_nothing(method: str) -> None:
    assert not orthogonalise(torch.zeros(3, 4), method=method, steps=5).any()
    assert orthogonalise(torch.zeros(0, 4), method=method, steps=5).shape == (0, 4)

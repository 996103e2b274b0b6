"""Names, parameters and splits of optimizers, against torch's."""

from __future__ import annotations

import itertools

import pytest
import torch

from raydz.errors import ConfigError
from raydz.optim import Update, WeightShard, build_optimizer

STEPS, NUMEL = 5, 37


def gradient(step: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(step))


def run(optimizer, dtype: torch.dtype, pieces: int = 1, grad_scale: float = 1.0) -> torch.Tensor:
    """Masters after some steps, updated in `pieces` slices."""
    shard = WeightShard.around(torch.empty(NUMEL, dtype=dtype))
    shard.store(torch.linspace(-1, 1, NUMEL))
    state = {name: torch.zeros(NUMEL) for name in optimizer.state_names}
    bounds = [NUMEL * i // pieces for i in range(pieces + 1)]
    for step in range(1, STEPS + 1):
        for start, stop in itertools.pairwise(bounds):
            optimizer.update(
                shard.slice(start, stop), gradient(step)[start:stop], {k: t[start:stop] for k, t in state.items()},
                Update(step, optimizer.lr, optimizer.weight_decay, grad_scale),
            )  # fmt: skip
    return shard.master()


def torch_run(kind, grad_scale: float = 1.0, **params) -> torch.Tensor:
    weight = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    optimizer = kind([weight], **params)
    for step in range(1, STEPS + 1):
        weight.grad = gradient(step) * grad_scale
        optimizer.step()
    return weight.detach()


PARAMS = {"lr": 0.01, "betas": (0.8, 0.9), "eps": 1e-6, "weight_decay": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("name", "mode", "oracle"),
    [("AdamW", True, torch.optim.AdamW), ("AdamW", False, torch.optim.AdamW), ("Adam", True, torch.optim.AdamW),
     ("Adam", False, torch.optim.Adam), ("adamw", True, torch.optim.AdamW)],
)  # fmt: skip
def test_names_and_mode_mean_what_they_mean_in_deepspeed(name: str, mode: bool, oracle, dtype) -> None:
    optimizer = build_optimizer(name, adam_w_mode=mode, **PARAMS)
    # A few roundings in each of five steps on weights of magnitude 1; Adam and AdamW differ by 1e-2 here.
    assert torch.allclose(run(optimizer, dtype), torch_run(oracle, **PARAMS), rtol=0, atol=2**-20)


def test_the_two_kinds_of_decay_can_be_told_apart() -> None:
    assert (torch_run(torch.optim.Adam, **PARAMS) - torch_run(torch.optim.AdamW, **PARAMS)).abs().max() > 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slices_give_the_bits_of_the_whole(dtype: torch.dtype) -> None:
    optimizer = build_optimizer("AdamW", **PARAMS)
    whole = run(optimizer, dtype)
    assert torch.equal(whole.view(torch.int32), run(optimizer, dtype, pieces=4).view(torch.int32))


def test_split_masters_follow_the_bits_of_whole_ones() -> None:
    optimizer = build_optimizer("AdamW", **PARAMS)
    whole, split = run(optimizer, torch.float32), run(optimizer, torch.bfloat16)
    assert torch.equal(whole.view(torch.int32), split.view(torch.int32))


def test_the_gradient_is_scaled_first() -> None:
    optimizer = build_optimizer("AdamW", **PARAMS)
    wanted = torch_run(torch.optim.AdamW, grad_scale=0.25, **PARAMS)
    assert torch.allclose(run(optimizer, torch.float32, grad_scale=0.25), wanted, rtol=0, atol=2**-20)


def test_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        build_optimizer("Lamb")
    assert "optimizer.type" in str(caught.value) and "Lamb" in str(caught.value)

"""SGD, Lion and torch's optimizers by name over flat shards, against torch and the papers' equations."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from raydz.errors import ConfigError
from raydz.optim import Update, WeightShard, build_optimizer
from tests.optim.references import Lion

STEPS, NUMEL = 6, 101
# Six steps of at most lr 0.05, each with a handful of roundings, on weights of magnitude 1.
TOLERANCE = 2**-20

CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "sgd": ("SGD", torch.optim.SGD, {}),
    "sgd-decay": ("SGD", torch.optim.SGD, {"weight_decay": 0.1}),
    "sgd-momentum": ("SGD", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    "sgd-nesterov": ("SGD", torch.optim.SGD, {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}),
    "lion": ("Lion", Lion, {"betas": (0.8, 0.95), "weight_decay": 0.1}),
    "adamw-default": ("AdamW", torch.optim.AdamW, {"weight_decay": 0.1, "eps": 1e-4}),
    "adadelta": ("Adadelta", torch.optim.Adadelta, {"rho": 0.8, "weight_decay": 0.1}),
    "adagrad": ("Adagrad", torch.optim.Adagrad, {"lr_decay": 0.1, "eps": 1e-6, "weight_decay": 0.1}),
    "adamax": ("Adamax", torch.optim.Adamax, {"betas": (0.8, 0.9), "weight_decay": 0.1}),
    "nadam": ("NAdam", torch.optim.NAdam, {"betas": (0.8, 0.9), "momentum_decay": 0.01, "eps": 1e-4}),
    "nadam-decoupled": ("NAdam", torch.optim.NAdam, {"decoupled_weight_decay": True, "weight_decay": 0.1, "eps": 1e-4}),
    "radam": ("RAdam", torch.optim.RAdam, {"betas": (0.8, 0.9), "weight_decay": 0.1, "eps": 1e-4}),
    "rmsprop": ("RMSprop", torch.optim.RMSprop, {"alpha": 0.8, "eps": 1e-3, "weight_decay": 0.1}),
    "rmsprop-full": ("RMSprop", torch.optim.RMSprop, {"momentum": 0.5, "centered": True, "eps": 1e-1}),
}
LR = 0.05


def gradient(step: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(step))


def run(optimizer, dtype: torch.dtype, bounds=(0, NUMEL), grad_scale: float = 1.0, numel: int = NUMEL) -> torch.Tensor:
    """Masters after some steps, updated slice by slice."""
    shard = WeightShard.around(torch.empty(numel, dtype=dtype))
    shard.store(torch.linspace(-1, 1, numel))
    state = {name: torch.zeros(numel) for name in optimizer.state_names}
    for step in range(1, STEPS + 1):
        for start, stop in itertools.pairwise(bounds):
            optimizer.update(
                shard.slice(start, stop), gradient(step, numel)[start:stop],
                {k: t[start:stop] for k, t in state.items()},
                Update(step, LR, optimizer.weight_decay, grad_scale),
            )  # fmt: skip
    return shard.master()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_each_follows_its_reference(case: str, dtype: torch.dtype) -> None:
    name, oracle, params = CASES[case]
    found = run(build_optimizer(name, lr=LR, **params), dtype, grad_scale=0.25)
    weight = torch.nn.Parameter(torch.linspace(-1, 1, NUMEL))
    reference = oracle([weight], lr=LR, **params)
    for step in range(1, STEPS + 1):
        weight.grad = gradient(step) * 0.25
        reference.step()
    torch.testing.assert_close(found, weight.detach(), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_where_a_shard_is_cut_does_not_change_a_bit(case: str) -> None:
    name, _, params = CASES[case]
    numel = 140_000  # more than two pieces
    optimizer = build_optimizer(name, lr=LR, **params)
    whole = run(optimizer, torch.float32, (0, numel), numel=numel)
    cut = run(optimizer, torch.float32, (0, 16, 17, 96, 1000, 70_001, numel), numel=numel)
    assert torch.equal(whole.view(torch.int32), cut.view(torch.int32))
    split = run(optimizer, torch.bfloat16, (0, 50, numel), numel=numel)
    assert torch.equal(whole.view(torch.int32), split.view(torch.int32))


def test_adam_without_bias_correction_takes_raw_moments() -> None:
    found = run(build_optimizer("AdamW", lr=LR, betas=(0.8, 0.9), eps=1e-3, bias_correction=False), torch.float32)
    weight, m, v = torch.linspace(-1, 1, NUMEL), torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(1, STEPS + 1):
        g = gradient(step)
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        weight = weight - LR * m / (v.sqrt() + 1e-3)
    torch.testing.assert_close(found, weight, rtol=0, atol=TOLERANCE)
    corrected = run(build_optimizer("AdamW", lr=LR, betas=(0.8, 0.9), eps=1e-3), torch.float32)
    assert (corrected - found).abs().max() > 1e-2


def test_nadam_begun_late_knows_the_product_of_its_momenta() -> None:
    from raydz.optim.by_name import _mu_product

    product = 1.0
    for step in range(1, 40):
        product *= 0.9 * (1 - 0.5 * 0.96 ** (step * 0.004))
    assert _mu_product(40, 0.9, 0.004) == pytest.approx(product, rel=1e-12)
    assert _mu_product(10**7, 0.9, 0.004) == 0.0


def test_unknown_parameters_and_names_are_refused() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        build_optimizer("NAdam", nonsense=1)
    with pytest.raises(ConfigError, match="NAdam"):
        build_optimizer("LBFGS")

"""Muon over stacked matrices (experts): each is made orthogonal by itself, whoever owns it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from raydz.errors import ConfigError
from raydz.optim import build_optimizer
from raydz.zero.layout import Segment
from raydz.zero.matrices import matrices_of
from raydz.zero.settings import ParameterSettings, plan_settings
from tests.optim.references import Both, ExactMuon, by_decay
from tests.optim.training import DECAY, LR, MUON, Case, train_with_engine
from tests.zero.models import INNER, WIDTH, Block, Plain
from tests.zero.training import assert_equal_bits, batch_for, build, num_labels, part

EXPERTS = 3
SLOW = pytest.mark.slow


class ExpertBlock(Block):
    """All experts for every token, with fixed shares: `stack` (E, INNER, WIDTH), as transformers keeps them."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.5)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.tanh(torch.einsum("...w,eiw->...ei", x, self.stack))
        shares = x.new_tensor([0.7, 0.5, 0.3])[:, None]
        return x + self.down(torch.tanh(self.up(x)) + (each * shares).sum(-2))


class Experts(Plain):
    def make_block(self) -> nn.Module:
        return ExpertBlock()


@dataclass
class Stack(torch.optim.Optimizer):
    """`ExactMuon` on each of a stacked parameter's matrices, as parameters of their own."""

    parameter: nn.Parameter

    def __post_init__(self) -> None:
        self.views = [nn.Parameter(one) for one in self.parameter.detach().unbind(0)]  # share the memory
        self.muon = ExactMuon(self.views, lr=MUON["muon_lr"], momentum=MUON["momentum"], weight_decay=DECAY)

    def step(self) -> None:
        for view, grad in zip(self.views, self.parameter.grad.unbind(0), strict=True):
            view.grad = grad.clone()
        self.muon.step()

    def zero_grad(self) -> None:
        self.parameter.grad = None


def train_with_torch(case: Case, world_size: int) -> dict[str, np.ndarray]:
    run = case.run()
    model = build(run)
    stacks = [block.stack for block in model.layers]
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not other for other in [*stacks, *matrices])]
    optimizer = Both(
        *(Stack(stack) for stack in stacks),
        ExactMuon(matrices, lr=MUON["muon_lr"], momentum=MUON["momentum"], weight_decay=DECAY),
        torch.optim.AdamW(by_decay(rest, DECAY), lr=MUON["adam_lr"], betas=MUON["betas"], eps=MUON["eps"]),
    )
    for step in range(1, run.steps + 1):
        batch = batch_for(step)
        sums = [run.loss(model, part(batch, rank, world_size), rank, step) for rank in range(world_size)]
        (sum(sums[1:], sums[0]) / num_labels(batch)).backward()
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)
        optimizer.step()
        optimizer.zero_grad()
    return {n: p.detach().numpy().copy() for n, p in model.named_parameters()}


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 3), pytest.param(2, 2, marks=SLOW)])
def test_each_expert_is_orthogonal_by_itself(ranks, stage: int, world: int) -> None:
    case = Case("Muon", stage, model=Experts)
    found = ranks(world).run(train_with_engine, case)[0].weights
    # As in test_sharded: a gradient's rounding grows by at most 485, 1.2e-4 of lr in each of three steps.
    for name, weights in train_with_torch(case, world).items():
        np.testing.assert_allclose(found[name], weights, rtol=0, atol=1.2e-5, err_msg=name)


@pytest.mark.parametrize("keys", [(), ("bf16_optimizer_states", "bf16_master_weights_and_grads")], ids=str)
def test_stages_have_the_same_bits(ranks, keys) -> None:
    case = Case("Muon", 3, model=Experts, bf16=True, keys=keys)
    first, *others = [ranks(3).run(train_with_engine, case.with_(stage=stage))[0].weights for stage in (0, 2, 3)]
    for other in others:
        assert_equal_bits(other, first)


def test_experts_lie_one_after_the_other_and_know_their_first_element() -> None:
    found = list(matrices_of(7, Segment("stack", (3, 2, 5), 32), ParameterSettings(0.0, is_matrix=True)))
    assert [(m.segment.start, m.segment.stop, m.segment.shape, m.first) for m in found] == [
        (32, 42, (2, 5), 0), (42, 52, (2, 5), 10), (52, 62, (2, 5), 20),
    ]  # fmt: skip
    assert [m.part((40, 55)) for m in found] == [(8, 10), (0, 10), (0, 3)]


def test_a_convolution_is_no_stack_unless_asked_for() -> None:
    optimizer, model = build_optimizer("Muon", lr=LR), Experts()
    settings = plan_settings(model, optimizer)
    assert settings["layers.0.stack"].is_matrix and not settings["layers.0.conv.weight"].is_matrix
    model.layers[0].conv.weight.use_muon = True
    assert plan_settings(model, optimizer)["layers.0.conv.weight"].is_matrix


def test_four_dimensions_are_refused() -> None:
    model = Experts()
    model.layers[0].stack = nn.Parameter(torch.zeros(2, 2, 2, 2))
    model.layers[0].stack.use_muon = True
    with pytest.raises(ConfigError, match=r"layers\.0\.stack"):
        plan_settings(model, build_optimizer("Muon"))

"""The numerics contract (raydz/zero/README.md) at world sizes 1 to 4, against plain torch in one process."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.parity.training import Case, Outcome, describe, train_with_engine, train_with_torch

WORLDS = (1, 2, 3, 4)
ACCUMULATION = {1: 3, 2: 3, 3: 2, 4: 3}  # divides the rows of a rank
# Four AdamW steps at lr 1e-2 on weights of magnitude 1: 16 units in the last place of fp32. Two were seen.
WEIGHT_TOLERANCE = 16 * 2**-23
# Sums of about 50 token losses of magnitude 2, each within an ulp or two.
LOSS_TOLERANCE = 1e-6
NORM_TOLERANCE = 5e-6  # relative


def assert_equal_bits(left: Outcome, right: Outcome) -> None:
    assert left.weights.keys() == right.weights.keys()
    for name, weights in left.weights.items():
        assert np.array_equal(weights.view(np.int32), right.weights[name].view(np.int32)), name
    assert left.losses == right.losses
    assert left.norms == right.norms


def assert_close(outcome: Outcome, oracle: Outcome) -> None:
    assert outcome.weights.keys() == oracle.weights.keys()
    for name, weights in outcome.weights.items():
        np.testing.assert_allclose(weights, oracle.weights[name], rtol=0, atol=WEIGHT_TOLERANCE, err_msg=name)
    np.testing.assert_allclose(outcome.losses, oracle.losses, rtol=0, atol=LOSS_TOLERANCE)
    np.testing.assert_allclose(outcome.norms, oracle.norms, rtol=NORM_TOLERANCE)


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", WORLDS)
def test_every_stage_equals_one_process_of_torch(ranks, world: int, stage: int, tied: bool) -> None:
    case = Case(stage=stage, tied=tied)
    assert_close(ranks(world).run(train_with_engine, case)[0], train_with_torch(case))


@pytest.mark.parametrize("boundary", [False, True], ids=["each_micro_batch", "boundary"])
@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize("world", WORLDS)
def test_accumulation_equals_one_big_batch(ranks, world: int, stage: int, boundary: bool) -> None:
    case = Case(stage=stage, accumulation=ACCUMULATION[world], boundary=boundary)
    assert_close(ranks(world).run(train_with_engine, case)[0], train_with_torch(case))


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", WORLDS)
def test_stages_are_bit_equal_without_accumulation(ranks, world: int, bf16: bool) -> None:
    first, *others = [ranks(world).run(train_with_engine, Case(stage=s, bf16=bf16))[0] for s in range(4)]
    for other in others:
        assert_equal_bits(first, other)


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", WORLDS)
def test_stages_are_bit_equal_in_each_class_of_accumulation(ranks, world: int, bf16: bool) -> None:
    base = Case(accumulation=ACCUMULATION[world], bf16=bf16)
    boundary = [base, base.with_(stage=1), base.with_(stage=2, boundary=True), base.with_(stage=3, boundary=True)]
    each = [base.with_(stage=2), base.with_(stage=3)]
    for cases in (boundary, each):
        first, *others = [ranks(world).run(train_with_engine, case)[0] for case in cases]
        for other in others:
            assert_equal_bits(first, other)


LAYOUTS = [
    Case(stage=3, bucket=50),
    Case(stage=3, bucket=1),
    Case(stage=3, persistence=0),
    Case(stage=3, persistence=100),
    Case(stage=3, prefetch=0),
    Case(stage=3, prefetch=10**9),
    Case(stage=3, checkpointing=True),
    Case(stage=1, bucket=50),
    Case(stage=2, bucket=300),
]


@pytest.mark.parametrize("case", LAYOUTS, ids=describe)
@pytest.mark.parametrize("world", (2, 3))
def test_buckets_prefetch_and_recomputation_do_not_change_a_bit(ranks, world: int, case: Case) -> None:
    assert_equal_bits(
        ranks(world).run(train_with_engine, case)[0], ranks(world).run(train_with_engine, Case(stage=3))[0]
    )


def train_bf16_with_torch(case: Case) -> list[float]:
    """Losses of plain torch: bf16 forward and backward, fp32 masters, torch's own cast of the weights."""
    from tests.parity.training import STEPS, batch_for, build_model, loss_sum

    masters = build_model(case, "cpu")
    with torch.no_grad():
        for name, p in masters.named_parameters():
            p.copy_(masters.initial_values(name, 0, p.numel(), 0).view_as(p))
    groups = [
        {"params": [p for p in masters.parameters() if p.dim() > 1], "weight_decay": case.weight_decay},
        {"params": [p for p in masters.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer, losses = torch.optim.AdamW(groups, lr=1e-2), []
    for step in range(1, STEPS + 1):
        batch = batch_for(step)
        valid = (batch["labels"] != -100).sum()
        half = build_model(case, "cpu").to(torch.bfloat16)
        half.load_state_dict({name: p.detach().to(torch.bfloat16) for name, p in masters.named_parameters()})
        loss = loss_sum(half, batch) / valid
        loss.backward()
        for p, h in zip(masters.parameters(), half.parameters(), strict=True):
            p.grad = h.grad.float()
        torch.nn.utils.clip_grad_norm_(masters.parameters(), case.clip)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("world", WORLDS)
def test_bf16_over_fp32_masters_follows_torch(ranks, world: int) -> None:
    case = Case(stage=3, bf16=True)
    outcome = ranks(world).run(train_with_engine, case)[0]
    # Logits of magnitude 1 carry 2^-9 relative error, and the mean over 36 tokens averages it.
    np.testing.assert_allclose(outcome.losses, train_bf16_with_torch(case), rtol=0, atol=2**-8)
    assert all(weights.dtype == np.float32 for weights in outcome.weights.values())

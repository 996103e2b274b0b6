"""Updates through fp32 copies that are rounded back by chance."""

from __future__ import annotations

import itertools

import pytest
import torch

from raydz.optim import Part, Update, WeightShard, Widening, build_optimizer

WIDENING = Widening(seed=3, piece_numel=1 << 16)
NUMEL = 1 << 12


def train(steps: int, *, keeps_rest: bool, state_dtype: torch.dtype, lr: float = 1e-5, cuts=(0, NUMEL)):
    """AdamW on weights of 1 under a constant gradient of 1: each step is lr long."""
    optimizer = build_optimizer("AdamW", lr=lr, eps=0.0)
    shard = WeightShard.around(torch.empty(NUMEL, dtype=torch.bfloat16), keeps_rest=keeps_rest)
    shard.store(torch.ones(NUMEL))
    state = {name: torch.zeros(NUMEL, dtype=state_dtype) for name in optimizer.state_names}
    for step in range(1, steps + 1):
        for low, high in itertools.pairwise(cuts):
            views = {name: tensor[low:high] for name, tensor in state.items()}
            with WIDENING.lend(shard.slice(low, high), views, Part("w", low, step)) as (wide, wide_state):
                optimizer.update(wide, torch.ones(high - low), wide_state, Update(step, lr))
    return shard, state


def test_masters_move_on_average_by_steps_far_below_their_unit() -> None:
    shard, _ = train(40, keeps_rest=False, state_dtype=torch.float32, lr=1e-4)
    moved = 1 - float(shard.compute.double().mean())
    # Downwards the unit is 2^-8; 40 steps of 2.6% of it: a deviation of sqrt(40 * 0.026) units for an element.
    assert abs(moved - 40e-4) < 5 * 1.02 * 2**-8 / NUMEL**0.5
    assert set(shard.compute.tolist()) > {1.0}


def test_moments_are_right_on_average() -> None:
    _, state = train(50, keeps_rest=True, state_dtype=torch.bfloat16)
    exact = {"exp_avg": 1 - 0.9**50, "exp_avg_sq": 1 - 0.999**50}
    for name, value in exact.items():
        found = state[name].double()
        # A rounding is off by at most 2^-8 of the value; fifty of them, as a random walk, over NUMEL elements.
        assert abs(float(found.mean()) / value - 1) < 5 * 50**0.5 * 2**-8 / NUMEL**0.5, name
        assert len(set(found.tolist())) > 1


@pytest.mark.parametrize("cuts", [(0, 1, 700, NUMEL), (0, 2048, NUMEL)])
def test_cuts_do_not_change_a_bit(cuts) -> None:
    whole, pieces = (train(3, keeps_rest=False, state_dtype=torch.bfloat16, cuts=c) for c in ((0, NUMEL), cuts))
    assert torch.equal(whole[0].compute, pieces[0].compute)
    assert all(torch.equal(whole[1][name], pieces[1][name]) for name in whole[1])


def test_what_needs_no_copy_is_lent_itself() -> None:
    shard, state = WeightShard.around(torch.ones(4, dtype=torch.bfloat16)), {"m": torch.zeros(4)}
    with WIDENING.lend(shard, state, Part("w", 0, 1)) as (wide, wide_state):
        assert wide is shard and wide_state["m"] is state["m"]


def test_master_and_states_are_rounded_independently() -> None:
    half = torch.full((NUMEL,), 1 + 2.0**-9)
    shard = WeightShard.around(torch.ones(NUMEL, dtype=torch.bfloat16), keeps_rest=False)
    state = {"a": torch.ones(NUMEL, dtype=torch.bfloat16), "b": torch.ones(NUMEL, dtype=torch.bfloat16)}
    with WIDENING.lend(shard, state, Part("w", 0, 1)) as (wide, wide_state):
        wide.compute.copy_(half)
        for values in wide_state.values():
            values.copy_(half)
    ups = torch.stack([t > 1 for t in (shard.compute, state["a"], state["b"])]).double()
    assert (torch.corrcoef(ups) - torch.eye(3)).abs().max() < 5 / NUMEL**0.5


def test_an_exception_in_the_update_writes_nothing() -> None:
    shard = WeightShard.around(torch.ones(4, dtype=torch.bfloat16), keeps_rest=False)
    with pytest.raises(ZeroDivisionError), WIDENING.lend(shard, {}, Part("w", 0, 1)) as (wide, _):
        wide.compute.fill_(5)
        raise ZeroDivisionError
    assert shard.compute.tolist() == [1] * 4


class Counted:
    """An optimizer that says how often it was called, and with noise or not."""

    def __init__(self, inner):
        self.inner, self.calls = inner, []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def update(self, weights, grad, state, now):
        self.calls.append((weights.compute.dtype, now.noise is not None))
        self.inner.update(weights, grad, state, now)


@pytest.mark.native
@pytest.mark.parametrize("keeps_rest", [True, False])
@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["AdamW", "Adam", "SGD", "Lion", "Muon", "RMSprop"])
def test_one_pass_has_the_bits_of_copies(monkeypatch, name: str, state_dtype, keeps_rest: bool) -> None:
    params = {"SGD": {"momentum": 0.9, "weight_decay": 0.1}, "Adam": {"adam_w_mode": False}}.get(name, {})
    found = []
    for one_pass in (True, False):
        if not one_pass:
            monkeypatch.setattr("raydz.optim.widening.kernels_for", lambda tensor: None)
        optimizer = Counted(build_optimizer(name, lr=1e-2, **params))
        shard = WeightShard.around(torch.empty(NUMEL, dtype=torch.bfloat16), keeps_rest=keeps_rest)
        shard.store(torch.linspace(-1, 1, NUMEL))
        state = {name: torch.zeros(NUMEL, dtype=state_dtype) for name in optimizer.state_names}
        for step in range(1, 4):
            grad = torch.randn(NUMEL, generator=torch.Generator().manual_seed(step)).bfloat16()
            now = Update(step, 1e-2, optimizer.weight_decay, 0.5)
            WIDENING.update(optimizer, shard, grad, state, now, Part("w", 77, step))
        kernel = one_pass and name != "RMSprop"
        wide = torch.bfloat16 if kernel or keeps_rest else torch.float32
        assert optimizer.calls == [(wide, kernel)] * 3
        found.append((shard, state))
    (one, one_state), (copies, copies_state) = found
    assert torch.equal(one.compute, copies.compute)
    assert not keeps_rest or torch.equal(one.low, copies.low)
    assert all(torch.equal(one_state[key], copies_state[key]) for key in one_state)


def test_pieces_of_copies_do_not_change_a_bit() -> None:
    found = []
    for piece in (NUMEL, 1000):
        shard = WeightShard.around(torch.ones(NUMEL, dtype=torch.bfloat16), keeps_rest=False)
        state = {"square_avg": torch.zeros(NUMEL, dtype=torch.bfloat16)}
        optimizer = build_optimizer("RMSprop", lr=1e-3)
        Widening(3, piece).update(optimizer, shard, torch.ones(NUMEL), state, Update(1, 1e-3), Part("w", 5, 1))
        found.append((shard.compute, state["square_avg"]))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])

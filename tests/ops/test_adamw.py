"""Oracles: numpy fp32 written down from the formula (bit for bit), and torch.optim (within a tolerance)."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy
import pytest
import torch

from raydz.errors import ConfigError, LayoutError
from raydz.ops import adamw_step, merge_master, round_bf16, split_master
from raydz.ops.adamw import Buffers, adamw_reference, step_scalars
from raydz.ops.stochastic import Noise, random_words, round_stochastic

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
SETTINGS = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


@dataclass
class State:
    """Buffers of one shard; `offset` elements into their storages, so that they begin at odd addresses."""

    master: torch.Tensor
    grad: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor
    low: torch.Tensor | None = None
    out: torch.Tensor | None = None

    @classmethod
    def random(cls, numel, *, grad_dtype=torch.float32, split=False, out_dtype=None, offset=0, seed=0):
        generator = torch.Generator().manual_seed(seed)
        master, grad, exp_avg, exp_avg_sq = torch.randn(4, numel, generator=generator)
        hi, low = split_master(master) if split else (master, None)
        out = None if out_dtype is None else torch.zeros(numel, dtype=out_dtype)
        state = cls(hi, grad.to(grad_dtype), exp_avg * 0.1, exp_avg_sq.square(), low, out)
        return state.moved(offset)

    def moved(self, offset=0):
        """A copy."""

        def move(tensor):
            if tensor is None:
                return None
            storage = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
            storage[offset:] = tensor
            return storage[offset:]

        return State(*(move(tensor) for tensor in vars(self).values()))

    def step(self, step, *, threads=1, **settings):
        return adamw_step(**vars(self), **{**SETTINGS, **settings}, step=step, threads=threads)

    def reference_step(self, step, *, decoupled=True, noise=None, **settings):
        scalars = step_scalars(**{**SETTINGS, **settings}, step=step, decoupled=decoupled)
        return adamw_reference(Buffers(**vars(self)), scalars, decoupled, noise)


def assert_same_bits(left: State, right: State):
    """NaNs are equal to each other: which operand's payload survives is the compiler's choice."""
    for (name, a), b in zip(vars(left).items(), vars(right).values(), strict=True):
        if a is None or name == "low":
            assert (a is None and b is None) or torch.equal(a, b), name
            continue
        as_int = torch.int32 if a.element_size() == 4 else torch.int16
        assert torch.equal(a.isnan(), b.isnan()), name
        same = (a.view(as_int) == b.view(as_int)) | a.isnan()
        assert same.all(), f"{name} differs at {(~same).nonzero().flatten().tolist()[:5]}"


def oracle(state: State, step: int, *, decoupled: bool, grad_scale: float = 1.0):
    """The formula in numpy, every operation rounded to fp32."""
    f32 = numpy.float32
    lr, b1, b2, eps, wd = SETTINGS.values()
    p, m, v = (t.numpy().copy() for t in (state.master, state.exp_avg, state.exp_avg_sq))
    g = state.grad.float().numpy() * f32(grad_scale)
    if decoupled:
        p = p * f32(1 - lr * wd)
    else:
        g = g + p * f32(wd)
    m = m * f32(b1) + g * f32(1 - b1)
    v = v * f32(b2) + (g * g) * f32(1 - b2)
    denominator = numpy.sqrt(v) / f32(math.sqrt(1 - b2**step)) + f32(eps)
    p = p - f32(lr / (1 - b1**step)) * (m / denominator)
    assert p.dtype == m.dtype == v.dtype == f32
    return (torch.from_numpy(t) for t in (p, m, v))


@pytest.mark.parametrize("decoupled", [True, False])
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_reference_is_the_formula_rounded_after_every_operation(grad_dtype, decoupled):
    state = State.random(1000, grad_dtype=grad_dtype)
    for step in (1, 2, 10, 100_000):
        p, m, v = oracle(state, step, decoupled=decoupled, grad_scale=0.37)
        state.reference_step(step, decoupled=decoupled, grad_scale=0.37)
        assert torch.equal(state.master, p)
        assert torch.equal(state.exp_avg, m)
        assert torch.equal(state.exp_avg_sq, v)


FORMS = list(itertools.product(FLOATS, [False, True], [None, torch.bfloat16, torch.float16], [True, False]))


@pytest.mark.native
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_kernels_equal_the_reference_at_every_length_and_offset(isa, form):
    grad_dtype, split, out_dtype, decoupled = form
    for numel in [*range(66), 511, 513, 1031]:
        kernel = State.random(
            numel, grad_dtype=grad_dtype, split=split, out_dtype=out_dtype, offset=numel % 4, seed=numel
        )
        reference = kernel.moved()
        kernel.step(3, decoupled=decoupled, grad_scale=0.37)
        reference.reference_step(3, decoupled=decoupled, grad_scale=0.37)
        assert_same_bits(kernel, reference)


@pytest.mark.native
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16], ids=str)
def test_kernels_equal_the_reference_on_any_bit_pattern(isa, grad_dtype, out_dtype):
    """Denormals, infinities and NaNs in every place; every 16-bit gradient there is."""
    numel = 1 << 16
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(-(2**31), 2**31, (4, numel), dtype=torch.int64, generator=generator).to(torch.int32)
    master, grad, exp_avg, exp_avg_sq = words.view(torch.float32)
    if grad_dtype != torch.float32:
        grad = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(grad_dtype)
    kernel = State(master, grad, exp_avg, exp_avg_sq.abs(), out=torch.zeros(numel, dtype=out_dtype))
    reference = kernel.moved()
    assert kernel.step(7) == reference.reference_step(7) == int((~grad.isfinite()).sum())
    assert_same_bits(kernel, reference)


@pytest.mark.native
def test_every_16_bit_weight_is_rounded_as_torch_rounds_fp16(isa):
    """Values around every fp16 number, through a step that leaves the master as it is."""
    halves = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(torch.float16).float()
    master = torch.cat([halves, halves * (1 + 2**-11), halves * (1 + 2**-12), halves + 2**-25, halves * 1.0001])
    zeros = torch.zeros_like(master)
    state = State(master.clone(), zeros.clone(), zeros.clone(), zeros, out=torch.zeros_like(master).half())
    state.step(1, weight_decay=0.0)
    assert torch.equal(state.master.nan_to_num(), master.nan_to_num())
    expected = State(master, zeros, zeros, zeros, out=master.half())
    assert_same_bits(State(master, zeros, zeros, zeros, out=state.out), expected)


@pytest.mark.parametrize("decoupled", [True, False])
def test_many_steps_follow_torch_optim(decoupled):
    """Both round to fp32 after a handful of operations a step: 20 steps stay within some tens of roundings."""
    state = State.random(4000)
    state.exp_avg.zero_(), state.exp_avg_sq.zero_()
    parameter = torch.nn.Parameter(state.master.clone())
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    optimizer = kind([parameter], lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, foreach=False)
    for step in range(1, 21):
        state.grad.copy_(torch.randn(4000, generator=torch.Generator().manual_seed(step)))
        parameter.grad = state.grad.clone()
        optimizer.step()
        state.step(step, decoupled=decoupled)
    torch.testing.assert_close(state.master, parameter.detach(), rtol=32 * 2**-24, atol=20 * 3e-3 * 32 * 2**-24)


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_split_master_takes_the_same_steps_as_fp32(grad_dtype):
    split = State.random(3000, grad_dtype=grad_dtype, split=True)
    whole = State.random(3000, grad_dtype=grad_dtype, out_dtype=torch.bfloat16)
    for step in range(1, 11):
        split.step(step)
        whole.step(step)
    assert torch.equal(merge_master(split.master, split.low), whole.master)
    assert torch.equal(split.master, whole.out)
    assert torch.equal(whole.out, round_bf16(whole.master))


@pytest.mark.native
def test_threads_do_not_change_the_result(isa):
    states = [State.random(300_001, grad_dtype=torch.bfloat16, split=True) for _ in range(4)]
    for state, threads in zip(states, (1, 2, 3, 7), strict=True):
        state.grad[[0, 150_000, 300_000]] = math.inf
        assert state.step(2, threads=threads) == 3
        assert_same_bits(state, states[0])


def test_the_step_number_is_the_only_history():
    first, second = State.random(100), State.random(100)
    first.moved().step(1)
    first.step(9)
    second.step(9)
    assert_same_bits(first, second)


@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
def test_gradients_that_are_not_finite_are_counted_after_scaling(grad_dtype):
    state = State.random(70, grad_dtype=grad_dtype)
    state.grad[[3, 40, 69]] = torch.tensor([math.nan, math.inf, -math.inf], dtype=grad_dtype)
    assert state.moved().step(1) == 3
    state.grad[5] = 6e4
    assert state.moved().step(1, grad_scale=1e34) == 4
    assert State.random(70).step(1) == 0


def test_the_reference_stands_in_where_there_are_no_kernels(without_kernels):
    state, expected = (State.random(70_000, split=True, out_dtype=torch.float16) for _ in range(2))
    state.grad[7] = expected.grad[7] = math.nan
    assert state.step(2) == expected.reference_step(2) == 1
    assert_same_bits(state, expected)


def test_buffers_that_do_not_fit_are_named():
    good = vars(State.random(8))
    bad = {
        "master": torch.zeros(8, dtype=torch.bfloat16),
        "grad": torch.zeros(8, dtype=torch.float64),
        "exp_avg": torch.zeros(9),
        "exp_avg_sq": torch.zeros(8, 2)[:, 0],
        "low": torch.zeros(8, dtype=torch.int16),
        "out": torch.zeros(8),
    }
    for name, tensor in bad.items():
        with pytest.raises(LayoutError) as caught:
            adamw_step(**{**good, name: tensor}, **SETTINGS, step=1)
        # A remainder beside an fp32 master is the master's fault.
        assert caught.value.where == {"low": "master"}.get(name, name)


@pytest.mark.parametrize(("name", "value"), [("step", 0), ("beta1", 1.0), ("beta2", -0.1)])
def test_impossible_settings_are_named(name, value):
    with pytest.raises(ConfigError) as caught:
        adamw_step(**vars(State.random(8)), **{**SETTINGS, "step": 1, name: value})
    assert caught.value.where == name


def by_hand(state: State, noise: Noise, **settings) -> State:
    """A step on fp32 copies, then each bf16 tensor rounded by its lane."""
    wide = State(*(t if t is None or t.dtype == torch.int16 else t.float() for t in vars(state).values()))
    wide.grad, wide.out = state.grad, state.out
    if state.low is not None:
        wide.master, wide.low = merge_master(state.master, state.low), None
    wide.reference_step(3, **settings)
    words = random_words(noise.key, noise.first, noise.first + wide.master.numel(), torch.device("cpu"))
    if state.low is not None:
        wide.master, wide.low = split_master(wide.master)
    for lane, name in enumerate(("master", "exp_avg", "exp_avg_sq")):
        kept = getattr(state, name)
        if kept.dtype == torch.bfloat16 and not (name == "master" and state.low is not None):
            rounded = torch.empty_like(kept)
            round_stochastic(getattr(wide, name), words, lane, rounded)
            setattr(wide, name, rounded)
    return wide


def in_bf16(state: State, names) -> State:
    return State(**{name: t.bfloat16() if name in names else t for name, t in vars(state).items()})


MOMENTS = ("exp_avg", "exp_avg_sq")
CHANCES = [(MOMENTS, True), (MOMENTS, False), (("master", *MOMENTS), False), (("master",), False), (MOMENTS[:1], True)]


@pytest.mark.native
@pytest.mark.parametrize("grad_dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("names", "split"), CHANCES, ids=str)
def test_kernels_round_bf16_states_by_the_same_chance(isa, grad_dtype, names, split):
    for numel in [*range(0, 66, 5), 7, 511, 513, 1031]:
        start = State.random(numel, grad_dtype=grad_dtype, split=split, seed=numel)
        kernel = in_bf16(start, names).moved(numel % 4)
        noise = Noise(numel * 0x1234567, 1 << 33)
        expected = by_hand(kernel.moved(), noise, grad_scale=0.37)
        reference = kernel.moved()
        kernel.step(3, noise=noise, grad_scale=0.37)
        assert_same_bits(kernel, expected)
        reference.reference_step(3, noise=noise, grad_scale=0.37)
        assert_same_bits(reference, expected)


@pytest.mark.native
def test_kernels_round_any_bit_pattern_by_the_same_chance(isa):
    numel = 1 << 15
    words = torch.randint(-(2**31), 2**31, (4, numel), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    kernel = in_bf16(State(*words.view(torch.float32)), ("master", *MOMENTS))
    reference = kernel.moved()
    kernel.step(7, noise=Noise(3))
    reference.reference_step(7, noise=Noise(3))
    assert_same_bits(kernel, reference)


@pytest.mark.native
def test_neither_cuts_nor_threads_change_a_rounding(isa):
    whole, cut, threaded = (in_bf16(State.random(300_001, split=True), MOMENTS) for _ in range(3))
    whole.step(2, noise=Noise(11, 40))
    threaded.step(2, noise=Noise(11, 40), threads=3)
    for low, high in ((0, 1), (1, 700), (700, 70_001), (70_001, 300_001)):
        part = State(**{name: None if t is None else t[low:high] for name, t in vars(cut).items()})
        part.step(2, noise=Noise(11, 40 + low))
    assert_same_bits(cut, whole)
    assert_same_bits(threaded, whole)


def test_bf16_moments_need_noise():
    with pytest.raises(LayoutError) as caught:
        in_bf16(State.random(8), MOMENTS).step(1)
    assert caught.value.where == "exp_avg"

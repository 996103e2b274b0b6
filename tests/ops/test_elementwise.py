"""Lion and SGD in one pass. Oracles: numpy fp32 written down from the formula, and for kernels the torch reference."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy
import pytest
import torch

from raydz.errors import LayoutError
from raydz.ops import merge_master, split_master
from raydz.ops.elementwise import lion_update, sgd_update
from raydz.ops.operands import Operands
from raydz.ops.stochastic import Noise

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
LION = {"lr": 3e-3, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.1}
SGD = {"lr": 0.05, "weight_decay": 0.1, "momentum": 0.9, "dampening": 0.3, "nesterov": False, "is_first": False}
PLAIN = {**SGD, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0}
KINDS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "lion": (lion_update, LION, 1),
    "sgd": (sgd_update, PLAIN, 0),
    "sgd-l2": (sgd_update, {**PLAIN, "weight_decay": 0.1}, 0),
    "momentum": (sgd_update, SGD, 1),
    "momentum-first": (sgd_update, {**SGD, "is_first": True}, 1),
    "nesterov": (sgd_update, {**SGD, "nesterov": True, "dampening": 0.0}, 1),
    "nesterov-no-l2": (sgd_update, {**SGD, "nesterov": True, "weight_decay": 0.0}, 1),
}


def operands(kind, numel, *, grad=torch.float32, master="fp32", out=None, state=torch.float32, offset=0, seed=0):
    """Random operands whose buffers begin `offset` elements into their storages."""
    generator = torch.Generator().manual_seed(seed)
    p, g, s = torch.randn(3, numel, generator=generator)
    hi, low = (p, None) if master == "fp32" else split_master(p)
    made = Operands(
        hi, g.to(grad), (s.to(state),)[: KINDS[kind][2]], low if master == "split" else None,
        None if out is None else torch.zeros(numel, dtype=out),
    )  # fmt: skip
    return copied(made, offset)


def copied(source: Operands, offset: int = 0) -> Operands:
    def move(tensor):
        if isinstance(tensor, tuple):
            return tuple(move(t) for t in tensor)
        if tensor is None:
            return None
        storage = torch.empty(offset + tensor.numel(), dtype=tensor.dtype)
        storage[offset:] = tensor
        return storage[offset:]

    return Operands(*(move(part) for part in source))


def step(kind, state: Operands, **more) -> int:
    update, settings, _ = KINDS[kind]
    return update(state, **{**settings, **more})


def assert_same_bits(left: Operands, right: Operands) -> None:
    """NaNs are equal to each other."""
    for name in ("master", "low", "out", "states"):
        ours, theirs = getattr(left, name), getattr(right, name)
        for a, b in zip(ours, theirs, strict=True) if name == "states" else [(ours, theirs)]:
            if a is None:
                assert b is None
                continue
            bits = torch.int32 if a.element_size() == 4 else torch.int16
            same = (a.view(bits) == b.view(bits)) | (a.isnan() & b.isnan())
            assert same.all(), f"{name} differs at {(~same).nonzero().flatten().tolist()[:5]}"


@pytest.fixture
def reference(monkeypatch):
    """Run a step in torch."""

    def run(kind, state, **more):
        with monkeypatch.context() as patch:
            patch.setattr("raydz.ops.elementwise.kernels_for", lambda tensor: None)
            return step(kind, state, **more)

    return run


def formula(kind: str, state: Operands, grad_scale: float):
    """Master and state after a step in numpy, every operation rounded to fp32."""
    f32, settings = numpy.float32, KINDS[kind][1]
    p, g = state.master.numpy(), state.grad.float().numpy() * f32(grad_scale)
    s = state.states[0].numpy() if state.states else None
    lr, decay = settings["lr"], settings["weight_decay"]
    if kind == "lion":
        b1, b2 = settings["beta1"], settings["beta2"]
        direction = numpy.sign(s * f32(b1) + g * f32(1 - b1))
        return p * f32(1 - lr * decay) - direction * f32(lr), s * f32(b2) + g * f32(1 - b2)
    if decay:
        g = g + p * f32(decay)
    if s is not None:
        s = g if settings["is_first"] else s * f32(settings["momentum"]) + g * f32(1 - settings["dampening"])
        g = g + s * f32(settings["momentum"]) if settings["nesterov"] else s
    return p - g * f32(lr), s


@pytest.mark.parametrize("grad", FLOATS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_reference_is_the_formula_rounded_after_every_operation(kind, grad, reference):
    state = operands(kind, 1000, grad=grad)
    p, s = formula(kind, state, 0.37)
    assert p.dtype == numpy.float32
    reference(kind, state, grad_scale=0.37)
    assert torch.equal(state.master, torch.from_numpy(p))
    assert not state.states or torch.equal(state.states[0], torch.from_numpy(s))


FORMS = [
    *itertools.product(FLOATS, ["fp32", "split"], [None, torch.bfloat16, torch.float16], [torch.float32]),
    *itertools.product(FLOATS, ["fp32", "split", "alone"], [None], [torch.bfloat16]),
    (torch.bfloat16, "alone", None, torch.float32),
]


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference_at_every_length_and_offset(isa, kind, reference):
    for number, (grad, master, out, state) in enumerate(FORMS):
        # Every length for each form in turn, a few for all.
        lengths = [numel for numel in range(66) if numel % len(FORMS) == number] + [0, 1, 17, 64, 65, 511, 1031]
        for numel in lengths:
            kernel = operands(
                kind, numel, grad=grad, master=master, out=out, state=state, offset=numel % 4, seed=numel
            )  # fmt: skip
            expected, noise = copied(kernel), Noise((1 << 64) - 9, 5)
            step(kind, kernel, grad_scale=0.37, noise=noise)
            reference(kind, expected, grad_scale=0.37, noise=noise)
            assert_same_bits(kernel, expected)


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_equal_the_reference_on_any_bit_pattern(isa, kind, reference):
    """Denormals, infinities and NaNs in every place, and signed zeros, which an added 0 would change."""
    numel = 1 << 14
    words = torch.randint(-(2**31), 2**31, (3, numel), generator=torch.Generator().manual_seed(1))
    words[:, :300] = torch.randint(-1, 1, (3, 300)) << 31
    p, g, s = words.to(torch.int32).view(torch.float32)
    kernel = Operands(p, g, (s,)[: KINDS[kind][2]], out=torch.zeros(numel, dtype=torch.float16))
    expected = copied(kernel)
    assert step(kind, kernel) == reference(kind, expected) == int((~g.isfinite()).sum())
    assert_same_bits(kernel, expected)


@pytest.mark.native
@pytest.mark.parametrize("kind", ["lion", "nesterov"])
def test_threads_do_not_change_the_result(isa, kind):
    states = [operands(kind, 300_001, master="alone", state=torch.bfloat16) for _ in range(3)]
    for state, threads in zip(states, (1, 2, 5), strict=True):
        state.grad[[0, 150_000, 300_000]] = math.inf
        assert step(kind, state, threads=threads, noise=Noise(7)) == 3
        assert_same_bits(state, states[0])


@pytest.mark.parametrize("kind", KINDS)
def test_split_master_takes_the_same_steps_as_fp32(kind):
    split, whole = operands(kind, 3000, master="split"), operands(kind, 3000, out=torch.bfloat16)
    for _ in range(5):
        step(kind, split)
        step(kind, whole)
    assert torch.equal(merge_master(split.master, split.low), whole.master)
    assert torch.equal(split.master, whole.out)


def test_bf16_alone_needs_noise():
    for name, made in {"master": {"master": "alone"}, "exp_avg": {"state": torch.bfloat16}}.items():
        with pytest.raises(LayoutError) as caught:
            step("lion", operands("lion", 8, **made))
        assert caught.value.where == name


def test_buffers_that_do_not_fit_are_named():
    good = operands("lion", 8)
    bad = {"grad": good.grad.double(), "low": torch.zeros(8, dtype=torch.int16), "out": torch.zeros(8)}
    for name, tensor in bad.items():
        with pytest.raises(LayoutError) as caught:
            step("lion", good._replace(**{name: tensor}))
        assert caught.value.where == {"low": "master"}.get(name, name)
    with pytest.raises(LayoutError, match="where:  exp_avg"):
        step("lion", good._replace(states=(torch.zeros(9),)))

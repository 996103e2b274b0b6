"""Steps into second buffers, and streamed results. Oracles: the same step in place on a copy, and canaries around."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from raydz.errors import LayoutError
from raydz.ops import adamw_step, native, split_master
from raydz.ops.elementwise import lion_update, sgd_update
from raydz.ops.operands import Into, Operands
from raydz.ops.stochastic import Noise

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
CANARY = 0x5A
MARGIN = 80  # bytes beside a buffer, more than a line


def adamw(o: Operands, **more: Any):
    return adamw_step(
        o.master, o.grad, *o.states, low=o.low, out=o.out, lr=3e-3, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1,
        step=3, **more,
    )  # fmt: skip


def lion(o: Operands, **more: Any):
    return lion_update(o, lr=3e-3, beta1=0.9, beta2=0.99, weight_decay=0.1, **more)


def sgd(o: Operands, **more: Any):
    momentum = 0.9 if o.states else 0.0
    settings = {"lr": 0.05, "weight_decay": 0.1, "momentum": momentum, "dampening": 0.3, "nesterov": False}
    return sgd_update(o, **settings, is_first=False, **more)


KINDS: dict[str, tuple[Any, int]] = {"adamw": (adamw, 2), "lion": (lion, 1), "momentum": (sgd, 1), "sgd": (sgd, 0)}
NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "lion": ("exp_avg",), "momentum": ("momentum_buffer",), "sgd": ()}
# gradient, master, out, states
FORMS = [
    *itertools.product(FLOATS, ["fp32"], [None, torch.bfloat16, torch.float16], [torch.float32]),
    *itertools.product(FLOATS, ["split"], [None], [torch.float32, torch.bfloat16]),
    *itertools.product(FLOATS, ["alone"], [None], [torch.bfloat16]),
]


class Guarded:
    """Tensors `offset` elements into storages whose other bytes must stay as they are."""

    def __init__(self) -> None:
        self.around: list[tuple[torch.Tensor, int, int]] = []

    def copy(self, tensor: torch.Tensor | None, offset: int = 0) -> torch.Tensor | None:
        if tensor is None:
            return None
        size, num_bytes = tensor.element_size(), tensor.numel() * tensor.element_size()
        start = 64 + offset * size
        storage = torch.full((start + num_bytes + MARGIN,), CANARY, dtype=torch.uint8)
        storage[start : start + num_bytes] = tensor.contiguous().view(torch.uint8)
        self.around.append((storage, start, start + num_bytes))
        return storage[start : start + num_bytes].view(tensor.dtype)

    def check(self) -> None:
        for storage, start, stop in self.around:
            assert storage[:start].eq(CANARY).all() and storage[stop:].eq(CANARY).all()


def made(kind: str, numel: int, form, seed: int = 0) -> Operands:
    grad, master, out, state = form
    generator = torch.Generator().manual_seed(seed)
    p, g, *states = torch.randn(4, numel, generator=generator).abs()
    hi, low = split_master(p) if master == "split" else (p.bfloat16() if master == "alone" else p, None)
    kept = tuple(s.to(state) for s in states[: KINDS[kind][1]])
    return Operands(hi, g.to(grad), kept, low, None if out is None else torch.zeros(numel, dtype=out))


def copied(o: Operands, guarded: Guarded, offset: int = 0) -> Operands:
    def copy(tensor):
        return guarded.copy(tensor, offset)

    return Operands(copy(o.master), copy(o.grad), tuple(map(copy, o.states)), copy(o.low), copy(o.out))


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left.view(torch.uint8), right.view(torch.uint8))


def assert_into_equals_in_place(kind: str, numel: int, form) -> None:
    step, guarded, noise = KINDS[kind][0], Guarded(), Noise(numel * 77, 5)
    source = made(kind, numel, form, seed=numel)
    kept, expected = copied(source, guarded, numel % 4), copied(source, guarded)
    blank = copied(source, guarded, numel % 7)
    into = Into(blank.master.fill_(3), None if blank.low is None else blank.low.fill_(3), blank.states)
    count = step(kept, grad_scale=0.37, noise=noise, into=into)
    assert count == step(expected, grad_scale=0.37, noise=noise)
    for ours, theirs in [(into.master, expected.master), (into.low, expected.low), (kept.out, expected.out)]:
        assert same_bits(ours, theirs), (kind, numel, form)
    assert all(map(same_bits, into.states, expected.states)), (kind, numel, form)
    unchanged = zip((kept.master, kept.low, *kept.states), (source.master, source.low, *source.states), strict=True)
    assert all(same_bits(ours, theirs) for ours, theirs in unchanged), "a step changed what it read"
    guarded.check()


@pytest.fixture(params=[0, 1 << 62], ids=["streamed", "plain"])
def stream_from(request):
    """Stream results of any size, or of none."""
    if native.load() is None:
        pytest.skip("raydz was installed without its compiled kernels")
    before = native.require().set_stream_from(request.param)
    yield request.param
    native.require().set_stream_from(before)


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_into_second_buffers_has_the_bits_of_one_in_place(isa, stream_from, kind):
    for number, form in enumerate(FORMS):
        lengths = [numel for numel in range(66) if numel % len(FORMS) == number] + [0, 1, 31, 64, 65, 513, 1031]
        for numel in lengths:
            assert_into_equals_in_place(kind, numel, form)


@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_copies_first(without_kernels, kind):
    for form in FORMS[::4]:
        assert_into_equals_in_place(kind, 700, form)


@pytest.mark.native
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float16], ids=str)
def test_a_streamed_weight_is_the_plain_one_at_every_length_and_offset(isa, stream_from, out):
    native.require().set_stream_from(1 << 62)
    for numel in [*range(66), 511, 513, 1031]:
        plain, guarded = made("adamw", numel, (torch.bfloat16, "fp32", out, torch.float32), numel), Guarded()
        streamed = copied(plain, guarded, numel % 37)
        adamw(plain)
        native.require().set_stream_from(stream_from)
        adamw(streamed)
        native.require().set_stream_from(1 << 62)
        assert all(map(same_bits, streamed[:2], plain[:2])) and same_bits(streamed.out, plain.out)
        guarded.check()


@pytest.mark.native
@pytest.mark.parametrize("kind", KINDS)
def test_threads_do_not_change_what_is_written_apart(isa, stream_from, kind):
    form = (torch.bfloat16, "split", None, torch.bfloat16)
    results = []
    for threads in (1, 2, 5):
        o = made(kind, 300_001, form)
        into = Into(torch.empty_like(o.master), torch.empty_like(o.low), tuple(map(torch.empty_like, o.states)))
        KINDS[kind][0](o, threads=threads, noise=Noise(3), into=into)
        results.append(into)
    for into in results[1:]:
        assert same_bits(into.master, results[0].master) and same_bits(into.low, results[0].low)
        assert all(map(same_bits, into.states, results[0].states))


@pytest.mark.parametrize("kind", ["adamw", "lion", "momentum"])
def test_second_buffers_that_do_not_fit_are_named(kind):
    o = made(kind, 16, (torch.float32, "split", None, torch.float32))
    good = Into(torch.empty_like(o.master), torch.empty_like(o.low), tuple(map(torch.empty_like, o.states)))
    first = NAMES[kind][0]
    bad = {
        "into": good._replace(low=None),
        "into.master": good._replace(master=torch.empty(16)),
        "into.low": good._replace(low=torch.empty(15, dtype=torch.int16)),
        f"into.{first}": good._replace(states=(o.states[0], *good.states[1:])),
    }
    for where, into in bad.items():
        with pytest.raises(LayoutError) as caught:
            KINDS[kind][0](o, into=into)
        assert caught.value.where == where
    with pytest.raises(LayoutError, match="other parts"):
        KINDS[kind][0](o, into=good._replace(states=good.states[1:]))


def test_slices_of_second_buffers_are_the_same_memory():
    whole = Into(torch.zeros(8), None, (torch.zeros(8),))
    part = whole.slice(2, 5)
    part.master.fill_(1.0), part.states[0].fill_(2.0)
    assert whole.master.tolist() == [0, 0, 1, 1, 1, 0, 0, 0] and whole.states[0].sum() == 6

"""The order of updates and returns, and what a step that fails or is dropped leaves, with a kernel that adds."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from raydz.errors import OffloadError
from raydz.offload.hosted_unit import HostedUnit, Stage, StepPlan
from raydz.offload.links import REACHED, Links
from raydz.offload.memory import HostMemory
from raydz.offload.pipeline import UpdatePipeline
from raydz.offload.speculation import Judgement
from raydz.offload.tiers import HostTier, UnitShape, cut_units
from raydz.optim import AdamW, Update

NUM_UNITS, NUMEL = 4, 8


class Adding:
    """An update that adds gradient times factor, and waits at each unit until it is let through."""

    def __init__(self) -> None:
        self.order: list[tuple[int, bool]] = []
        self.gates = [threading.Event() for _ in range(NUM_UNITS)]
        self.begun = [threading.Event() for _ in range(NUM_UNITS)]
        for gate in self.gates:
            gate.set()

    def __call__(self, index: int, tensors: dict[str, Tensor], gradient: Tensor, plan: StepPlan, second) -> None:
        self.order.append((index, second is not None))
        self.begun[index].set()
        assert self.gates[index].wait(20)
        target = tensors["home"] if second is None else second["home"]
        target.copy_(tensors["home"] + gradient * plan.now.grad_scale)


class Late:
    """A mark that a test reaches when it likes, as a device does that is far behind the host."""

    def __init__(self) -> None:
        self.event = threading.Event()

    def wait(self) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        assert self.event.wait(20)

    def query(self) -> bool:
        return self.event.is_set()


def plan(scale: float = 1.0, step: int = 1) -> StepPlan:
    return StepPlan(AdamW(), Update(step, 0.1, grad_scale=scale))


@pytest.fixture
def setup():
    memory, adding = HostMemory(1 << 24), Adding()
    shapes = [UnitShape(i, 0, NUMEL, {"home": torch.float32}, f"unit {i}") for i in range(NUM_UNITS)]
    tier = HostTier(shapes, memory)
    units = [HostedUnit(shape, torch.zeros(NUMEL)) for shape in shapes]
    pipeline = UpdatePipeline(
        units, tier, Links(torch.device("cpu")), memory.empty, adding, Judgement("speculative")
    )  # fmt: skip
    pipeline.add_second_buffers()
    yield pipeline, adding, units
    for gate in adding.gates:
        gate.set()
    pipeline.close()
    memory.close()


def backward(pipeline: UpdatePipeline, foreseen: StepPlan | None, first: threading.Event | None = None) -> None:
    """Gradients of the last unit come first; the others only after the event."""
    pipeline.expect(foreseen)
    for index in reversed(range(NUM_UNITS)):
        pipeline.gradient_arrived(index, torch.full((NUMEL,), float(index + 1)))
        assert first is None or first.wait(20)


def values(units: list[HostedUnit]) -> list[float]:
    return [float(unit.weights[0]) for unit in units]


def test_waiting_updates_begin_with_what_forward_needs_first(setup):
    pipeline, adding, units = setup
    backward(pipeline, None)
    assert adding.order == []
    pipeline.commit(plan(0.5))
    pipeline.finish()
    assert adding.order == [(index, False) for index in range(NUM_UNITS)]
    assert values(units) == [0.5, 1.0, 1.5, 2.0]


def test_commit_returns_before_the_updates_and_each_unit_waits_for_its_own(setup):
    pipeline, adding, units = setup
    adding.gates[1].clear()
    backward(pipeline, None)
    pipeline.commit(plan())
    pipeline.await_unit(0)
    assert values(units)[0] == 1.0 and units[1].stage is not Stage.REST
    adding.gates[1].set()
    pipeline.await_unit(1)
    assert values(units)[1] == 2.0


def test_speculation_takes_the_newest_gradient_that_is_there(setup):
    pipeline, adding, units = setup
    marks = [Late() for _ in range(NUM_UNITS)]
    pipeline._links.to_host = lambda source, target: (target.copy_(source), marks[int(source[0]) - 1])[1]
    adding.gates[3].clear()
    marks[3].event.set()
    backward(pipeline, plan())
    assert adding.begun[3].wait(20)
    marks[2].event.set()
    marks[1].event.set()  # unit 0 was sent last and is not there
    adding.gates[3].set()
    assert adding.begun[2].wait(20)
    assert [index for index, _ in adding.order] == [3, 1, 2]
    marks[0].event.set()
    pipeline.commit(plan())
    pipeline.finish()
    assert values(units) == [1.0, 2.0, 3.0, 4.0]


def test_another_factor_drops_what_was_tried_and_what_is_being_tried(setup):
    pipeline, adding, units = setup
    adding.gates[1].clear()
    backward(pipeline, plan(), first=adding.begun[3])
    assert adding.begun[1].wait(20)
    pipeline.commit(plan(0.5))
    adding.gates[1].set()
    pipeline.finish()
    assert values(units) == [0.5, 1.0, 1.5, 2.0]
    assert {index for index, is_try in adding.order if not is_try} == set(range(NUM_UNITS))
    report = pipeline.report()
    assert report.mode == "speculative" and report.rolled_back and report.rollback_rate == 1.0


def test_the_same_factor_keeps_what_was_tried(setup):
    pipeline, adding, units = setup
    adding.gates[1].clear()
    backward(pipeline, plan())
    assert adding.begun[1].wait(20)
    pipeline.commit(plan())
    adding.gates[1].set()
    pipeline.finish()
    assert values(units) == [1.0, 2.0, 3.0, 4.0]
    assert sorted(index for index, _ in adding.order) == list(range(NUM_UNITS))  # each once
    assert not pipeline.report().rolled_back


@pytest.mark.parametrize("other", [plan(step=2), StepPlan(AdamW(beta1=0.8), plan().now), plan(1.0000001)])
def test_anything_that_decides_an_update_decides_whether_it_holds(setup, other):
    pipeline, _, _ = setup
    backward(pipeline, plan())
    pipeline.commit(other)
    assert pipeline.report().rolled_back


def test_a_dropped_step_changes_no_weight_and_the_next_one_counts(setup):
    pipeline, adding, units = setup
    adding.gates[2].clear()
    backward(pipeline, plan())
    assert adding.begun[2].wait(20)
    pipeline.drop()
    adding.gates[2].set()
    backward(pipeline, plan(2.0))
    assert values(units) == [0.0] * NUM_UNITS
    pipeline.commit(plan(2.0))
    pipeline.finish()
    assert values(units) == [2.0, 4.0, 6.0, 8.0]


def test_a_failure_ends_every_wait_with_its_cause(setup):
    pipeline, _, _ = setup
    advance = pipeline._advance

    def broken(index: int, *rest) -> None:
        if index == 1:
            raise OSError(5, "Input/output error")
        advance(index, *rest)

    pipeline._advance = broken
    backward(pipeline, None)
    pipeline.commit(plan())
    for call in (lambda: pipeline.await_unit(3), pipeline.finish, lambda: pipeline.commit(plan())):
        with pytest.raises(OffloadError, match="an update of offloaded weights failed") as caught:
            call()
        assert "Input/output error" in str(caught.value)


def test_units_are_cut_to_what_a_slot_holds():
    whole = UnitShape(3, 0, 10, {"home": torch.bfloat16, "exp_avg": torch.float32})
    assert [(u.start, u.stop) for u in cut_units([whole], 4)] == [(0, 4), (4, 8), (8, 10)]
    assert cut_units([whole], None) == [whole] and whole.num_bytes == 60
    empty = UnitShape(0, 0, 0, {"home": torch.float32})
    assert cut_units([empty], 4) == [empty]


def test_second_buffers_are_all_there_or_none():
    memory = HostMemory(4096 * 5)
    tier = HostTier([UnitShape(i, 0, NUMEL, {"home": torch.float32}) for i in range(3)], memory)
    with pytest.raises(OffloadError):
        tier.add_second()
    assert not tier.has_second and memory.bytes_held == 3 * 4096 and REACHED.query()

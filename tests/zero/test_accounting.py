"""What is held and what is sent: live buffers at stage 3, elements on the wire, engines in a loop."""

from __future__ import annotations

import gc
import os
from functools import partial

import pytest
import torch

from tests.zero.models import Plain
from tests.zero.training import Run, batch_for, num_labels, part, start, token_loss, train_step

BLOCKS = 4
ALIGNMENT = 16


def padded(numels: list[int], world_size: int) -> int:
    """Size of a flat group by hand: parameters at multiples of 16 elements, in the end a multiple for each rank."""
    total = sum(-(-numel // ALIGNMENT) * ALIGNMENT for numel in numels)
    return -(-total // (ALIGNMENT * world_size)) * ALIGNMENT * world_size


def sizes(world_size: int) -> tuple[int, int, int, int]:
    """Flat groups of `Plain` without persistent parameters: embedding, block, head, root (the norm)."""
    return (
        padded([42], world_size), padded([60, 10, 60], world_size), padded([42], world_size),
        padded([6, 6], world_size),
    )  # fmt: skip


def memory_run(stage: int, **changes) -> Run:
    zero = {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 0} | changes
    return Run(partial(Plain, BLOCKS), stage=stage, zero=tuple(zero.items()))


def live_names(engine) -> list[str]:
    """Units one of whose gathered buffers has memory, by its storage."""
    return [
        unit.spec.name
        for unit in engine.sharded.units
        if any(group.full.untyped_storage().nbytes() for group in unit.groups)
    ]


def watch_buffers(rank: int, world_size: int, run: Run) -> dict:
    """Names of live units after forward, backward and step, and most bytes gathered at once in the third step."""
    engine, peak = start(run), 0

    def look(*_) -> None:
        nonlocal peak
        peak = max(peak, sum(group.full.untyped_storage().nbytes() for group in engine.sharded.groups) // 4)

    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    for module in engine.module.modules():  # after the engine's own hooks, within the module's use
        module.register_forward_pre_hook(look)
        module.register_full_backward_hook(look)
    batch = batch_for(3)
    loss = token_loss(engine, part(batch, rank, world_size), rank, 3)
    found = {"forward": live_names(engine)}
    engine.backward(loss, denominator=num_labels(batch))
    found["backward"] = live_names(engine)
    engine.step()
    with torch.no_grad():
        engine(batch["ids"])
    found |= {"evaluation": live_names(engine), "peak": peak}
    is_nan = [bool(p.isnan().all()) for p in engine.module.parameters()]
    found["placeholders"] = all(is_nan)
    engine.destroy()
    return found


def test_at_stage_3_only_the_root_and_the_last_unit_are_held_between_forward_and_backward(ranks) -> None:
    for found in ranks(2).run(watch_buffers, memory_run(3)):
        assert found["forward"] == ["", "head"]
        assert found["backward"] == []
        assert found["evaluation"] == []
        assert found["placeholders"]


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("prefetch", [0, 1, 140, 300])
def test_gathered_elements_are_root_current_and_prefetch_rounded_up_to_a_unit(ranks, world: int, prefetch: int) -> None:
    _, block, _, root = sizes(world)
    ahead = -(-prefetch // block) * block
    for found in ranks(world).run(watch_buffers, memory_run(3, stage3_prefetch_bucket_size=prefetch)):
        assert found["peak"] <= root + block + ahead
        assert prefetch == 0 or found["peak"] > root + block  # it does gather ahead


def test_max_live_parameters_bounds_what_is_gathered_ahead(ranks) -> None:
    _, block, _, root = sizes(2)
    limit = root + block
    run = memory_run(3, stage3_prefetch_bucket_size=10_000, stage3_max_live_parameters=limit)
    for found in ranks(2).run(watch_buffers, run):
        assert found["peak"] <= limit


def _weight_buffers(group) -> tuple:
    return group.full, group.weights.compute, group.weights.low, group.weights.separate


def bytes_held(rank: int, world_size: int, run: Run) -> int:
    """Bytes of weights, states and gradients on this rank between backward and step, each storage once."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    batch = batch_for(2)
    for i in range(run.accumulation):
        micro = part(part(batch, rank, world_size), i, run.accumulation)
        engine.backward(token_loss(engine, micro, rank, 2), denominator=num_labels(batch))
        if i + 1 < run.accumulation:
            engine.step()
    tensors = [t for group in engine.sharded.groups for t in _weight_buffers(group)]
    tensors += [t for state in engine.optimizer.states for t in state.values()]
    tensors += [t for grads in engine.sharded.gradients for t in (grads._full, grads.reduced)]
    held = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors if t is not None}
    engine.destroy()
    return sum(held.values())


# Bytes an element on every rank, and bytes an element of its shard: the table in raydz/zero/README.md.
BYTES = {
    ("fp32", 0): (16, 0), ("fp32", 1): (8, 12), ("fp32", 2): (4, 12), ("fp32", 3): (0, 16),
    ("bf16", 0): (18, 0), ("bf16", 1): (4, 14), ("bf16", 2): (2, 14), ("bf16", 3): (0, 16),
    ("fp16", 0): (20, 0), ("fp16", 1): (4, 16), ("fp16", 2): (2, 16), ("fp16", 3): (0, 18),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "stage"), BYTES)
@pytest.mark.parametrize("world", [2, 3])
def test_a_stage_holds_what_the_table_says(ranks, world: int, dtype: str, stage: int) -> None:
    embed, block, head, root = sizes(world)
    psi = embed + BLOCKS * block + head + root
    everywhere, sharded = BYTES[dtype, stage]
    for held in ranks(world).run(bytes_held, memory_run(stage).with_(bf16=dtype == "bf16", fp16=dtype == "fp16")):
        assert held == everywhere * psi + sharded * psi // world


def test_summing_micro_batches_in_bf16_costs_two_bytes_more_at_stage_1_and_none_at_stage_2(ranks) -> None:
    embed, block, head, root = sizes(2)
    psi = embed + BLOCKS * block + head + root
    run = memory_run(1).with_(bf16=True, accumulation=2)
    assert ranks(2).run(bytes_held, run) == [6 * psi + 14 * psi // 2] * 2
    run = memory_run(2).with_(bf16=True, accumulation=2)
    assert ranks(2).run(bytes_held, run) == [2 * psi + 14 * psi // 2] * 2


def count_elements(rank: int, world_size: int, run: Run) -> list[int]:
    """Elements this rank sends in each of three steps (scalars of norm and skip are not tensors of the clock)."""
    engine, sent = start(run), []
    for step in (1, 2, 3):
        before = engine.clock.elements_sent
        train_step(engine, run, rank, world_size, step)
        sent.append(engine.clock.elements_sent - before)
    engine.destroy()
    return sent


def wanted_elements(stage: int, world: int, micro_batches: int) -> tuple[int, int]:
    """(first, later) steps. With psi all elements, padded, each collective sends (N-1)/N of its size.

    0: one reduction and one gather of fp32 sums. 1: one reduction, and one gather in the next forward. 2: a reduction
    each micro-batch, one gather. 3: each micro-batch a reduction and two gathers, but for what is not gathered again
    for backward: the root and the last unit, which backward begins with, and the embedding, which is only looked up.
    In the first forward nobody knows yet that the head is the last, so it is gathered twice.
    """
    embed, block, head, root = sizes(world)
    psi = embed + BLOCKS * block + head + root
    later = {
        0: 2 * psi,
        1: 2 * psi,
        2: (micro_batches + 1) * psi,
        3: micro_batches * (3 * psi - embed - head - root),
    }[stage]
    first = later + head if stage == 3 else later
    return first * (world - 1) // world, later * (world - 1) // world


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_what_a_step_sends_is_what_its_stage_promises(ranks, stage: int, world: int, micro_batches: int) -> None:
    first, later = wanted_elements(stage, world, micro_batches)
    for sent in ranks(world).run(count_elements, memory_run(stage).with_(accumulation=micro_batches)):
        assert sent == [first, later, later]


def test_reduction_at_the_boundary_sends_no_more_than_one_micro_batch_does(ranks) -> None:
    run = memory_run(2).with_(accumulation=3, boundary=True)
    for sent in ranks(2).run(count_elements, run):
        assert sent == [wanted_elements(2, 2, 1)[1]] * 3


def make_and_destroy(rank: int, world_size: int, run: Run, times: int) -> list[tuple[int, int, int]]:
    """After each engine: bytes in tensors that Python knows, threads of the process, open files."""
    counts = []
    for _ in range(times):
        engine = start(run)
        train_step(engine, run, rank, world_size, 1)
        engine.destroy()
        del engine
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        num_bytes = sum(t.untyped_storage().nbytes() for t in tensors)
        counts.append((num_bytes, len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))))
    return counts


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_engines_made_and_destroyed_in_a_loop_leave_no_memory_threads_or_sockets(ranks, stage: int) -> None:
    for counts in ranks(2).run(make_and_destroy, Run(Plain, stage=stage), 6):
        assert counts[-1][0] == counts[1][0]
        assert counts[-1][1] <= counts[1][1]
        assert counts[-1][2] <= counts[1][2]


def destroyed_module(rank: int, world_size: int, run: Run) -> bool:
    """Whether a module whose engine is gone is an ordinary module again (in a world of one it holds its weights)."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    module = engine.module
    engine.destroy()
    batch = batch_for(1)
    token_loss(module, batch, 0, 1).backward()
    return all(p.grad is not None for p in module.parameters()) and "head.weight" in module.state_dict()


def test_after_destroy_the_module_has_no_hooks(ranks) -> None:
    assert ranks(1).run(destroyed_module, Run(Plain, stage=3)) == [True]

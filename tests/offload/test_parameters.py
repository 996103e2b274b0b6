"""Weights that live in host memory between uses: the same bits, less on the device, and everything else still works."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

from raydz.config import load_engine
from raydz.errors import ConfigError, OffloadError
from raydz.offload.memory import PAGE, HostMemory
from raydz.offload.parameters import ParameterOffload, on_device
from raydz.optim import WeightShard
from tests.zero.models import Adapted, OddSizes, Plain
from tests.zero.test_accounting import BLOCKS, memory_run, sizes, wanted_elements, watch_buffers
from tests.zero.training import (
    Run,
    assert_close,
    assert_equal_bits,
    batch_for,
    numpy_weights,
    owned_bytes,
    start,
    token_loss,
    train_step,
    train_with_engine,
    train_with_torch,
)  # fmt: skip

CPU = {"offload_param": {"device": "cpu"}}


def offloaded(run: Run, **zero) -> Run:
    return run.with_(zero=(*run.zero, *(CPU | zero).items()))


RUNS = {
    "fp32": Run(partial(Plain, 3), stage=3),
    "bf16-accumulation": Run(partial(Plain, 3), stage=3, bf16=True, accumulation=3),
    "fp16-boundary": Run(partial(Plain, 3), stage=3, fp16=True, accumulation=3, boundary=True),
    "used-twice": Run(partial(Plain, 2, order=(0, 1, 0), recompute="plain"), stage=3),
    "frozen": Run(Adapted, stage=3, bf16=True),
    "odd": Run(OddSizes, stage=3),
    "tied": Run(partial(Plain, 2, tied=True), stage=3, is_meta=False),
}
SLOW = ("fp16-boundary", "used-twice", "odd", "tied")


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in RUNS])
def test_every_bit_is_as_without_offload(ranks, name: str, world: int) -> None:
    wanted = ranks(world).run(train_with_engine, RUNS[name])[0]
    found = ranks(world).run(train_with_engine, offloaded(RUNS[name]))[0]
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    assert_equal_bits(found.weights, wanted.weights)


@pytest.mark.parametrize("world", [1, 2])
def test_training_is_what_plain_torch_does(ranks, world: int) -> None:
    run = Run(partial(Plain, 3), stage=3)
    assert_close(ranks(world).run(train_with_engine, offloaded(run))[0], train_with_torch(run, world))


@pytest.mark.slow
@pytest.mark.parametrize("zero", [{"zero_quantized_weights": True}, {"zero_hpz_partition_size": 2}])
def test_what_makes_gathers_smaller_works_on_host_memory_too(ranks, zero: dict) -> None:
    run = Run(partial(Plain, 3), stage=3, zero=tuple(zero.items()))
    wanted, found = (ranks(4).run(train_with_engine, r)[0] for r in (run, offloaded(run)))
    assert_equal_bits(found.weights, wanted.weights)


# -- what the device holds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1])
def test_one_rank_alone_releases_and_fetches_unit_by_unit(ranks, prefetch: int) -> None:
    _, block, _, root = sizes(1)
    run = offloaded(memory_run(3, stage3_prefetch_bucket_size=prefetch))
    (found,) = ranks(1).run(watch_buffers, run)
    assert found["forward"] == ["", "head"] and found["backward"] == [] and found["placeholders"]
    assert found["peak"] <= root + block + prefetch * block
    assert prefetch == 0 or found["peak"] > root + block


def places(rank: int, world_size: int, run: Run) -> dict[str, int]:
    """Bytes of weights in host memory and elsewhere, after a step; what was fetched in it; full gradients kept."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    before = engine.sharded.offload.bytes_fetched
    train_step(engine, run, rank, world_size, 2)
    held = engine.host_memory._held.keys()
    shards = [group.weights.compute for group in engine.sharded.groups]
    found = {
        "host": sum(t.nbytes for t in shards if t.untyped_storage().data_ptr() in held),
        "elsewhere": sum(t.nbytes for t in shards if t.untyped_storage().data_ptr() not in held),
        "gathered": sum(group.full.untyped_storage().nbytes() for group in engine.sharded.groups),
        "gradients": sum(0 if g.buffer is None else g.buffer.nbytes for g in engine.sharded.gradients),
        "fetched": engine.sharded.offload.bytes_fetched - before,
        "budgeted": engine.host_memory.bytes_held,
    }
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_between_steps_no_weight_and_no_gradient_is_on_the_device(ranks, world: int) -> None:
    embed, block, head, root = sizes(world)
    psi = embed + BLOCKS * block + head + root
    twice = psi - embed - head - root  # the rest is not gathered again for backward
    for found in ranks(world).run(places, offloaded(memory_run(3))):
        assert found["host"] == 4 * psi // world
        assert found["elsewhere"] == found["gathered"] == found["gradients"] == 0
        assert found["fetched"] == 4 * (psi + twice) // world
        assert found["budgeted"] == PAGE * (BLOCKS + 3)  # a page a group


def count_elements_once(rank: int, world_size: int, run: Run) -> int:
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    before = engine.clock.elements_sent
    train_step(engine, run, rank, world_size, 2)
    sent = engine.clock.elements_sent - before
    engine.destroy()
    return sent


def test_offload_sends_nothing_more_between_ranks(ranks) -> None:
    assert ranks(2).run(count_elements_once, offloaded(memory_run(3))) == [wanted_elements(3, 2, 1)[1]] * 2


def build_within(rank: int, world_size: int, run: Run, budget: str) -> str:
    try:
        start(run, parallel={"host_memory_budget": budget})
    except OffloadError as error:
        return str(error)
    return ""


def test_a_budget_that_is_too_small_refuses_by_name(ranks) -> None:
    (text,) = ranks(1).run(build_within, offloaded(memory_run(3)), "16KiB")
    assert "parallel.host_memory_budget" in text and "the weights of " in text
    assert ranks(1).run(build_within, offloaded(memory_run(3)), "64KiB") == [""]


# -- everything else -----------------------------------------------------------------------------------------------


def use_all_of_it(rank: int, world_size: int, run: Run) -> list[bytes]:
    """Evaluation, export, changes, freezing, an average, a skipped step: then every bit of this rank's state."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    with torch.no_grad():
        engine(batch_for(1)["ids"])
    with engine.gathered(modify=True), torch.no_grad():
        engine.module.head.weight.mul_(1.5)
    state = engine.full_state_dict()
    engine.load_full_state_dict({name: 0.5 * value for name, value in state.items()} if rank == 0 else None)
    train_step(engine, run, rank, world_size, 2)
    engine.set_trainable("layers.0", False)
    train_step(engine, run, rank, world_size, 3)
    engine.set_trainable("layers.0", True)
    train_step(engine, run, rank, world_size, 4)
    found = owned_bytes(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_whole_parameters_can_be_read_changed_and_frozen(ranks, world: int) -> None:
    run = Run(partial(Plain, 2), stage=3, bf16=True)
    assert ranks(world).run(use_all_of_it, offloaded(run)) == ranks(world).run(use_all_of_it, run)


def save_after_two(rank: int, world_size: int, run: Run, folder: str) -> None:
    engine = start(run)
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    engine.save_checkpoint(folder, "c")
    engine.destroy()


def third_step_of(rank: int, world_size: int, run: Run, folder: str):
    engine = start(run)
    engine.load_checkpoint(folder, "c")
    train_step(engine, run, rank, world_size, 3)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("saved_offloaded", [True, False])
def test_checkpoints_move_between_offloaded_and_not(ranks, tmp_path: Path, saved_offloaded: bool) -> None:
    plain = Run(partial(Plain, 2), stage=3, bf16=True)
    straight = ranks(2).run(train_with_engine, plain)[0]
    saving, loading = (offloaded(plain), plain) if saved_offloaded else (plain, offloaded(plain))
    ranks(2).run(save_after_two, saving, str(tmp_path))
    assert_equal_bits(ranks(2).run(third_step_of, loading, str(tmp_path))[0], straight.weights)


def run_from_weights_of_old(rank: int, world_size: int, run: Run) -> str:
    """A backward through a graph of before an update."""
    engine = start(run)
    loss = token_loss(engine, batch_for(1), rank, 1)
    train_step(engine, run, rank, world_size, 2)
    try:
        engine.backward(loss)
    except RuntimeError as error:
        return str(error)
    finally:
        engine.destroy()
    return "no error"


def test_a_graph_of_before_the_update_is_an_error(ranks) -> None:
    (text,) = ranks(1).run(run_from_weights_of_old, offloaded(Run(partial(Plain, 2), stage=3)))
    assert "modified by an inplace operation" in text


# -- parts ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_only_stage_3_releases_what_could_live_elsewhere(stage: int) -> None:
    with pytest.raises(ConfigError, match=r"(?s)offload_param\.device.*stage 3"):
        load_engine({"zero_optimization": {"stage": stage} | CPU})


class Recording(HostMemory):
    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.asked: list[bool | None] = []

    def empty(self, numel, dtype, what="", *, pinned=None):
        self.asked.append(pinned)
        return super().empty(numel, dtype, what, pinned=pinned)


@pytest.mark.parametrize("pinned", [True, False])
def test_pin_memory_says_whether_shards_are_pinned(pinned: bool) -> None:
    config = load_engine({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu", "pin_memory": pinned}}})
    memory = Recording()
    offload = ParameterOffload.from_config(config, lambda: memory, torch.device("cpu"))
    assert offload is not None
    offload.shard(10, torch.float32, "w")
    assert memory.asked == [pinned]
    none = load_engine({"zero_optimization": {"stage": 3, "offload_param": {"device": "none"}}})
    assert ParameterOffload.from_config(none, lambda: memory, torch.device("cpu")) is None


def test_weights_elsewhere_are_lent_to_the_device_and_put_back() -> None:
    """`meta` stands for a device; only what moves is looked at."""
    weights = WeightShard(torch.ones(4))
    with on_device(weights, torch.device("cpu")) as same:
        assert same is weights
    with on_device(weights, torch.device("meta")) as moved:
        assert moved.compute.is_meta
        moved.compute = torch.full((4,), 2.0)  # what an update would have left there
    assert weights.compute.tolist() == [2.0] * 4


# -- with the optimizer offloaded, too -----------------------------------------------------------------------------

OPTIMIZER = {"offload_optimizer": {"device": "cpu"}}


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["bf16-accumulation", "frozen", pytest.param("fp16-boundary", marks=pytest.mark.slow)])
def test_both_offloads_together_change_no_bit(ranks, name: str, world: int) -> None:
    wanted = ranks(world).run(train_with_engine, RUNS[name])[0]
    found = ranks(world).run(train_with_engine, offloaded(RUNS[name], **OPTIMIZER))[0]
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    assert_equal_bits(found.weights, wanted.weights)


def watch_gradients(rank: int, world_size: int, run: Run) -> list[int]:
    """Bytes of gradients outside of offload's host memory, when each block's backward is over and at the end."""
    engine, found = start(run), []
    train_step(engine, run, rank, world_size, 1)
    tell = engine.sharded.on_event

    def on_event(event, unit) -> None:
        if event in ("completed", "end_backward"):
            kept = [t for g in engine.sharded.gradients for t in (g.buffer, g.reduced, g._arriving) if t is not None]
            storages = {t.untyped_storage()._cdata: t.untyped_storage() for t in kept}
            elsewhere = [s.nbytes() for s in storages.values() if s.data_ptr() not in engine.host_memory._held]
            found.append(sum(elsewhere))
        if tell is not None:
            tell(event, unit)

    engine.sharded.on_event = on_event
    train_step(engine, run, rank, world_size, 2)
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_leave_the_device_while_backward_runs(ranks, world: int) -> None:
    embed, block, head, root = sizes(world)
    run = offloaded(memory_run(3), **OPTIMIZER)
    for found in ranks(world).run(watch_gradients, run):
        assert len(found) == BLOCKS + 4
        in_flight = 1 if world == 1 else 3 * 1.5  # whole ones, and the halves that arrive
        assert max(found) <= 4 * (root + embed + head + in_flight * block)
        assert found[-1] == 0


def two_backwards_in_a_step(rank: int, world_size: int, run: Run) -> list[bytes]:
    engine = start(run)
    for step in (1, 2):
        for half in (step, step + 10):
            engine.backward(token_loss(engine, batch_for(half), rank, step), denominator=60.0)
        engine.step()
    found = [tensor.tobytes() for _, tensor in sorted(numpy_weights(engine).items())]
    engine.destroy()
    return found


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_gradients_that_left_come_back_for_one_more_backward(ranks, world: int) -> None:
    run = Run(partial(Plain, 2), stage=3, bf16=True)
    found, wanted = (ranks(world).run(two_backwards_in_a_step, r)[0] for r in (offloaded(run, **OPTIMIZER), run))
    assert found == wanted


def freeze_after_each_step(rank: int, world_size: int, run: Run):
    engine = start(run)
    for step in range(1, 6):
        train_step(engine, run, rank, world_size, step)
        engine.set_trainable(f"layers.{step % 2}", step % 3 == 0)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("ratio", [0.3, pytest.param(0.6, marks=pytest.mark.slow)])
@pytest.mark.parametrize("parameters", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_groups_may_come_home_to_the_device_when_others_are_frozen(ranks, parameters: bool, ratio: float) -> None:
    """`ratio` keeps what is used first on the device, and what that is changes with what is trained."""
    run = Run(partial(Plain, 3), stage=3, bf16=True)
    section = {"offload_optimizer": {"device": "cpu", "ratio": ratio}} | (CPU if parameters else {})
    (found,) = ranks(1).run(freeze_after_each_step, run.with_(zero=(*run.zero, *section.items())))
    assert_equal_bits(found, ranks(1).run(freeze_after_each_step, run)[0])


def host_bytes(rank: int, world_size: int, run: Run) -> tuple[int, int]:
    engine = start(run)
    shards = [group.weights.compute for group in engine.sharded.groups]
    held, units = engine.host_memory.bytes_held, {t.untyped_storage().data_ptr() for t in shards}
    homes = {engine.optimizer._tier.fetch(i)["home"].data_ptr() for i in range(len(shards))}
    engine.destroy()
    return held, len(units & homes)


def test_weights_are_in_host_memory_once(ranks) -> None:
    """What forward fetches is what the update changes."""
    run = memory_run(3)
    (both,) = ranks(1).run(host_bytes, offloaded(run, **OPTIMIZER))
    (optimizer,) = ranks(1).run(host_bytes, run.with_(stage=2, zero=(*run.zero, *OPTIMIZER.items())))
    assert both[0] == optimizer[0] and both[1] == BLOCKS + 3


# -- what a step waits for -----------------------------------------------------------------------------------------


def waits_of_a_step(rank: int, world_size: int, run: Run, nap_s: float) -> tuple[dict[str, float], int]:
    engine = start(run, **{"parallel": {"activation_checkpointing": "full"}}, **ACTIVATIONS)
    train_step(engine, run, rank, world_size, 1)
    fetch, calls = engine.sharded.offload.disk.fetch, []

    def slow(shard, into) -> None:
        calls.append(time.sleep(nap_s))
        fetch(shard, into)

    engine.sharded.offload.disk.fetch = slow
    _, report = train_step(engine, run, rank, world_size, 2)
    engine.destroy()
    return report.offload.waits_s, len(calls)


ACTIVATIONS = {"activation_checkpointing": {"cpu_checkpointing": True}}


def test_a_slow_disk_is_counted_as_waiting_for_parameters(ranks, tmp_path: Path) -> None:
    disk = {"device": "nvme", "nvme_path": str(tmp_path), "max_in_cpu": 0}
    run = memory_run(3, offload_param=disk)
    ((waits, calls),) = ranks(1).run(waits_of_a_step, run, 0.02)
    assert calls == 2 * BLOCKS + 3 and waits["parameters"] >= 0.02 * calls
    assert 0 < waits["activations"] < waits["parameters"]

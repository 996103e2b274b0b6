"""States that move to the host between phases: every bit comes back, the memory is gone meanwhile, misuse is named."""

from __future__ import annotations

import gc
from enum import Enum
from functools import partial
from pathlib import Path

import pytest
import torch

from raydz.errors import ConfigError, OffloadError, TrainingError
from raydz.offload.memory import HostMemory
from raydz.offload.moves import StorageMoves
from raydz.zero.moves import MOVABLE
from tests.zero.models import Plain
from tests.zero.training import (
    Run,
    assert_equal_bits,
    batch_for,
    num_labels,
    numpy_weights,
    owned_bytes,
    part,
    start,
    token_loss,
    train_step,
    train_with_engine,
)  # fmt: skip

CPU = torch.device("cpu")


def device_bytes(engine) -> dict[str, int]:
    """Bytes by kind of state, each storage once and for the first kind that has it; the engine's buffers, by hand."""
    groups, gradients, seen = engine.sharded.groups, engine.sharded.gradients, set()
    kinds = {
        "optim_states": [t for states in engine.optimizer.states for t in states.values()],
        "hp_params": [t for g in groups for t in (g._weights.low, g._weights.separate)],
        "lp_params": [t for g in groups for t in (g._weights.compute, g.full)],
        "lp_grads": [g.reduced for g in gradients],
        "contiguous_grad_buffer": [g._full for g in gradients],
    }
    if engine.average is not None:
        kinds["optim_states"] += engine.average.values
    found = dict.fromkeys(kinds, 0)
    for kind, tensors in kinds.items():
        for storage in (t.untyped_storage() for t in tensors if t is not None):
            found[kind] += 0 if storage._cdata in seen else storage.nbytes()
            seen.add(storage._cdata)
    return found


def move_after_each_step(rank: int, world_size: int, run: Run, decay: float | None):
    import raydz.engine
    from tests.zero.training import build

    engine = raydz.engine.initialize(build(run), run.config(), device="cpu", ema_decay=decay)
    for step in (1, 2, 3):
        train_step(engine, run, rank, world_size, step)
        bits, there = owned_bytes(engine), sum(device_bytes(engine).values())
        engine.offload_states()
        assert sum(device_bytes(engine).values()) == 0 < there == engine.state_moves.bytes_away
        engine.reload_states()
        assert engine.state_moves.bytes_away == engine.host_memory.bytes_held == 0
        assert owned_bytes(engine) == bits
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize(("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp32")])
def test_every_bit_comes_back_and_training_goes_on(ranks, stage: int, dtype: str, world: int) -> None:
    run = Run(partial(Plain, 2), stage=stage, bf16=dtype == "bf16", fp16=dtype == "fp16")
    wanted = ranks(world).run(train_with_engine, run)[0].weights
    found = ranks(world).run(move_after_each_step, run, 0.9 if stage == 3 else None)[0]
    assert_equal_bits(found, wanted)


def move_one_kind(rank: int, world_size: int, run: Run) -> dict[str, dict[str, int]]:
    """Bytes by kind after each kind alone has moved, with gradients there."""
    engine, found = start(run), {}
    batch = batch_for(1)
    engine.backward(token_loss(engine, part(batch, rank, world_size), rank, 1), denominator=num_labels(batch))
    found["none"] = device_bytes(engine)
    for kind in MOVABLE:
        engine.offload_states([kind])
        found[kind] = device_bytes(engine)
        engine.reload_states()
    assert device_bytes(engine) == found["none"]
    engine.step()
    train_step(engine, run, rank, world_size, 2)
    found["weights"] = numpy_weights(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_a_kind_moves_alone_also_between_backward_and_step(ranks, stage: int) -> None:
    run = Run(partial(Plain, 2), stage=stage, bf16=True, steps=2)
    found = ranks(2).run(move_one_kind, run)[0]
    there = found["none"]
    kinds = [kind for kind in MOVABLE if stage == 1 or kind != "contiguous_grad_buffer"]  # freed at stage 3
    assert all(there[kind] > 0 for kind in kinds)
    for kind in MOVABLE:
        assert found[kind] == there | {kind: 0}
    assert_equal_bits(found["weights"], ranks(2).run(train_with_engine, run)[0].weights)


def misuse(rank: int, world_size: int, run: Run, folder: str) -> list[str]:
    """What is said to each use while states are away; afterwards everything works."""
    engine, said = start(run), []
    train_step(engine, run, rank, world_size, 1)
    state, ids = engine.full_state_dict(), batch_for(2)["ids"]
    micro_steps = engine.micro_steps
    uses = {
        "forward": lambda: engine(ids),
        "backward": lambda: engine.backward(torch.ones((), requires_grad=True) * 2),
        "step": engine.step,
        "discard": engine.discard_step,
        "save": lambda: engine.save_checkpoint(folder, "away"),
        "async save": lambda: engine.save_checkpoint(folder, "away", async_save=True),
        "load": lambda: engine.load_checkpoint(folder, "there"),
        "read": engine.full_state_dict,
        "set": lambda: engine.load_full_state_dict(state),
        "gather": lambda: engine.gathered().__enter__(),
        "change": lambda: engine.gathered(modify=True).__enter__(),
        "freeze": lambda: engine.set_trainable("layers.0", False),
        "16 bit": lambda: engine.save_16bit_model(folder),
    }
    engine.save_checkpoint(folder, "there")
    bits = owned_bytes(engine)
    engine.offload_states()
    for name, use in uses.items():
        try:
            use()
            said.append(f"{name}: done")
        except TrainingError as error:
            said.append(f"{name}: {error}")
    assert not (Path(folder) / "away").exists()
    engine.reload_states()
    assert owned_bytes(engine) == bits and engine.micro_steps == micro_steps
    train_step(engine, run, rank, world_size, 2)
    engine.destroy()
    return said


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_what_needs_absent_states_is_refused_by_name(ranks, tmp_path: Path, stage: int) -> None:
    gathers = (("stage3_gather_16bit_weights_on_model_save", True),)
    for said in ranks(2).run(misuse, Run(partial(Plain, 2), stage=stage, zero=gathers), str(tmp_path)):
        assert len(said) == 13
        for line in said:
            assert "moved to the host" in line and "engine.reload_states()" in line, line


def generate_without_states(rank: int, world_size: int, run: Run) -> list[bool]:
    """Whether a forward without gradients is what it was, while all but the weights is away."""
    engine, same = start(run), []
    train_step(engine, run, rank, world_size, 1)
    ids = batch_for(2)["ids"]
    with torch.no_grad():
        before = engine(ids)
        engine.offload_states(["optim_states", "hp_params", "lp_grads", "contiguous_grad_buffer"])
        same.append(torch.equal(engine(ids), before))
    placeholders = engine.module.embed.weight
    engine.offload_states(["lp_params"])
    same.append(bool(placeholders.isnan().all()))
    engine.reload_states()
    engine.reload_states()  # nothing is away: nothing happens
    with torch.no_grad():
        same.append(torch.equal(engine(ids), before))
    engine.destroy()
    return same


@pytest.mark.parametrize("stage", [1, 3])
def test_weights_may_stay_for_generation(ranks, stage: int) -> None:
    for same in ranks(2).run(generate_without_states, Run(partial(Plain, 2), stage=stage, bf16=True)):
        assert same == [True] * 3


def move_in_a_loop(rank: int, world_size: int, run: Run, times: int) -> list[int]:
    engine, counts = start(run), []
    train_step(engine, run, rank, world_size, 1)
    for _ in range(times):
        engine.offload_states()
        engine.reload_states()
        gc.collect()
        tensors = [t for t in gc.get_objects() if isinstance(t, torch.Tensor)]
        counts.append(sum(t.untyped_storage().nbytes() for t in tensors) + engine.host_memory.bytes_held)
    engine.destroy()
    return counts


def test_twenty_moves_leak_nothing(ranks) -> None:
    for counts in ranks(2).run(move_in_a_loop, Run(partial(Plain, 2), stage=3, bf16=True), 20):
        assert set(counts[1:]) == {counts[1]}


class Kind(Enum):
    """As DeepSpeed's enumeration of states."""

    OPTIM = "optim_states"


class Device(Enum):
    CPU = "cpu"
    NVME = "nvme"


def deepspeed_calls(rank: int, world_size: int, run: Run) -> list[str]:
    from raydz import deepspeed
    from tests.zero.training import build

    engine, *_ = deepspeed.initialize(model=build(run), config=run.config())
    found = []
    engine.offload_states(include=[Kind.OPTIM], device=Device.CPU, pin_memory=False, non_blocking=True)
    found.append(",".join(sorted(engine.raydz.sharded.absent)))
    engine.reload_states(non_blocking=True)
    found.append(",".join(sorted(engine.raydz.sharded.absent)))
    for arguments in ({"device": Device.NVME}, {"include": ["weights"]}):
        try:
            engine.offload_states(**arguments)
        except ConfigError as error:
            found.append(str(error))
    engine.destroy()
    return found


def test_deepspeed_s_call_and_enumerations_fit(ranks) -> None:
    (found,) = ranks(1).run(deepspeed_calls, Run(partial(Plain, 2), stage=2))
    assert found[:2] == ["optim_states", ""]
    assert "device=" in found[2] and "weights" in found[3] and "lp_params" in found[3]


# -- storages ------------------------------------------------------------------------------------------------------


def test_views_stay_views_and_shared_storages_move_once() -> None:
    moves, memory = None, HostMemory(1 << 20)
    base = torch.arange(10.0)
    view = base[3:7].view(2, 2)
    moves = StorageMoves(memory, CPU)
    moves.send([base, view, base, torch.empty(0)], pinned=False, blocking=True)
    assert moves.bytes_away == 40 and base.untyped_storage().nbytes() == 0
    moves.bring_back()
    assert base.tolist() == [float(i) for i in range(10)] and view.tolist() == [[3.0, 4.0], [5.0, 6.0]]
    view.zero_()
    assert base[3:7].tolist() == [0.0] * 4


def test_what_lies_in_host_memory_or_belongs_to_numpy_stays() -> None:
    memory = HostMemory(1 << 20)
    mine, shown = memory.empty(5, torch.float32), torch.ones(3)
    array = shown.numpy()
    moves = StorageMoves(memory, CPU)
    moves.send([mine, shown, torch.ones(2, device="meta")], pinned=False, blocking=True)
    assert moves.bytes_away == 0 and mine.nbytes == 20 and array.tolist() == [1.0] * 3


def test_a_budget_that_is_spent_moves_nothing() -> None:
    memory = HostMemory(8192)
    tensors = [torch.full((1000,), float(i)) for i in range(4)]
    moves = StorageMoves(memory, CPU)
    with pytest.raises(OffloadError, match=r"(?s)states moved away.*parallel\.host_memory_budget"):
        moves.send(tensors, pinned=False, blocking=True)
    assert moves.bytes_away == memory.bytes_held == 0
    assert all(t.tolist() == [float(i)] * 1000 for i, t in enumerate(tensors))

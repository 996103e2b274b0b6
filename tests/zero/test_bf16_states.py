"""bf16 moments and bf16 masters: bytes, the same bits over stages and cuts, near to fp32, kept by checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from raydz.config import load_engine
from raydz.errors import ConfigError
from tests.optim.test_states import resumed, straight
from tests.optim.training import Case, start, train_with_engine
from tests.zero.training import assert_equal_bits, batch_for, build, owned_bytes, part, train_step

SLOW = pytest.mark.slow
STATES, MASTERS = ("bf16_optimizer_states",), ("bf16_master_weights_and_grads",)
BOTH = STATES + MASTERS
ADAMW = Case("AdamW", 3, bf16=True)


def held(rank: int, world_size: int, case: Case) -> dict[str, int]:
    """Bytes of this rank between backward and step."""
    engine, run = start(case), case.run()
    batch = part(batch_for(1), rank, world_size)
    engine.backward(run.loss(engine, batch, rank, 1), denominator=1.0)
    weights = [group.weights for group in engine.sharded.groups]
    sums = [grads.sums for grads in engine.sharded.gradients]
    parts = {
        "moments": [t for states in engine.optimizer.states for t in states.values()],
        "masters": [t for w in weights for t in (w.low, w.separate) if t is not None],
        "compute": [w.compute for w in weights],
        "sums": sums,
    }
    engine.destroy()
    return {name: sum(t.numel() * t.element_size() for t in tensors) for name, tensors in parts.items()}


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize(
    ("keys", "masters", "moments"), [((), 2, 8), (STATES, 2, 4), (MASTERS, 0, 8), (BOTH, 0, 4)], ids=str
)
def test_bytes_of_an_element(ranks, keys, masters: int, moments: int, stage: int) -> None:
    found = ranks(2).run(held, ADAMW.with_(keys=keys, stage=stage))[0]
    numel = found["compute"] // 2
    summed = 2 if masters == 0 and stage else 4  # stage 0 needs the whole sum, in fp32
    assert numel and found == {
        "compute": 2 * numel, "masters": masters * numel, "moments": moments * numel, "sums": summed * numel
    }  # fmt: skip


@pytest.mark.parametrize(
    "name", ["AdamW", "Muon", pytest.param("SGD", marks=SLOW), pytest.param("RMSprop", marks=SLOW)]
)
@pytest.mark.parametrize("keys", [BOTH, pytest.param(STATES, marks=SLOW), pytest.param(MASTERS, marks=SLOW)], ids=str)
@pytest.mark.parametrize("world", [2, pytest.param(3, marks=SLOW)])
def test_stages_and_buckets_have_the_same_bits(ranks, name: str, keys, world: int) -> None:
    case = Case(name, 0, keys=keys)
    first = ranks(world).run(train_with_engine, case)[0]
    for other in (case.with_(stage=1), case.with_(stage=2), case.with_(stage=3), case.with_(stage=3, bucket=70)):
        assert_equal_bits(ranks(world).run(train_with_engine, other)[0].weights, first.weights)


def shards_after(rank: int, world_size: int, case: Case) -> list[bytes]:
    engine, run = start(case), case.run()
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    found = owned_bytes(engine)
    engine.destroy()
    return found


@pytest.mark.parametrize("keys", [STATES, MASTERS], ids=str)
def test_chance_is_the_seeds(ranks, keys) -> None:
    one, same, other = (ranks(1).run(shards_after, Case("AdamW", keys=keys, seed=seed)) for seed in (1, 1, 2))
    assert one == same and one != other


def long_training(rank: int, world_size: int, case: Case) -> list[float]:
    """Losses of 60 steps on one batch."""
    engine, run, losses = start(case), case.run(), []
    for _ in range(60):
        local, _ = train_step(engine, run, rank, world_size, 1)
        losses.append(sum(row[0] for row in engine.comms.reduce.all_gather_values([local])))
    engine.destroy()
    return losses


@pytest.mark.parametrize("keys", [BOTH, pytest.param(STATES, marks=SLOW), pytest.param(MASTERS, marks=SLOW)], ids=str)
def test_training_stays_near_that_with_fp32_states(ranks, keys) -> None:
    exact, found = (np.array(ranks(2).run(long_training, ADAMW.with_(keys=k))[0]) for k in ((), keys))
    assert exact[-1] < 0.7 * exact[0]  # it does train
    # A weight of magnitude 1 is off by up to 2^-8, a moment by 2^-8 of itself: a hundredth of the loss.
    np.testing.assert_allclose(found, exact, rtol=0.02)


def states_of(rank: int, world_size: int, case: Case, uri: str, load: bool) -> dict[str, np.ndarray]:
    """Moments and exact weights by parameter and kind in fp32, after two steps or a load. One rank, stage 0."""
    engine, run = start(case), case.run()
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    if load:
        train_step(engine, run, rank, world_size, 7)
        engine.load_checkpoint(uri)
    elif uri:
        engine.save_checkpoint(uri)
    found = {f"{name} weight": values.float().numpy().copy() for name, values in engine.full_state_dict().items()}
    for group, states in zip(engine.optimizer.groups, engine.optimizer.group_states, strict=True):
        for piece in group.layout.intervals(*group.owned):
            for kind, values in states.of(piece.offset, piece.offset + piece.stop - piece.start).items():
                found[f"{piece.name} {kind}"] = values.float().numpy().copy()
    engine.destroy()
    return found


def nearest_bf16(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values).bfloat16().float().numpy()


def test_a_checkpoint_of_bf16_states_loads_exactly_into_fp32_ones(ranks, tmp_path: Path) -> None:
    saved = ranks(1).run(states_of, ADAMW.with_(keys=BOTH), str(tmp_path), False)[0]
    loaded = ranks(1).run(states_of, ADAMW, str(tmp_path), True)[0]
    assert_equal_bits(loaded, saved)


def test_a_checkpoint_of_fp32_states_is_rounded_to_the_nearest_bf16(ranks, tmp_path: Path) -> None:
    saved = ranks(1).run(states_of, ADAMW, str(tmp_path), False)[0]
    loaded = ranks(1).run(states_of, ADAMW.with_(keys=BOTH), str(tmp_path), True)[0]
    assert loaded.keys() == saved.keys()
    for name, values in saved.items():
        np.testing.assert_array_equal(loaded[name], nearest_bf16(values), err_msg=name)


@pytest.mark.parametrize("name", ["AdamW", pytest.param("Muon", marks=SLOW)])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(ranks, tmp_path: Path, name: str) -> None:
    case, uri = Case(name, 3, keys=BOTH), str(tmp_path)
    wanted = ranks(2).run(straight, case, 4, uri)
    again = ranks(2).run(resumed, case, uri, 4)
    assert [shards for _, shards in again] == [shards for _, shards in wanted]
    other_stage = ranks(2).run(resumed, case.with_(stage=1, bucket=70), uri, 4)[0][0]
    assert_equal_bits(other_stage, wanted[0][0])


def test_a_frozen_and_thawed_unit_keeps_the_others_states(ranks) -> None:
    ranks(2).run(freeze_and_thaw, ADAMW.with_(keys=BOTH))


def freeze_and_thaw(rank: int, world_size: int, case: Case) -> None:
    engine, run = start(case), case.run()
    train_step(engine, run, rank, world_size, 1)
    before = owned_bytes(engine)
    engine.set_trainable("head", False)
    engine.set_trainable("head", True)
    dtypes = {t.dtype for states in engine.optimizer.states for t in states.values()}
    assert dtypes == {torch.bfloat16}
    same = [a == b for a, b in zip(owned_bytes(engine), before, strict=True)]
    assert any(same) and not all(same)  # the head's moments began anew
    train_step(engine, run, rank, world_size, 2)
    engine.destroy()


def evaluate_the_average(rank: int, world_size: int, keys: tuple[str, ...]) -> bool:
    from raydz.engine import initialize

    run = ADAMW.run()
    bf16 = {"enabled": True, **dict.fromkeys(keys, True)}
    engine = initialize(build(run), run.config() | {"bf16": bf16}, device="cpu", ema_decay=0.9)
    for step in (1, 2):
        train_step(engine, run, rank, world_size, step)
    average, masters = [v.clone() for v in engine.average.values], owned_bytes(engine)
    with engine.averaged():
        engine(batch_for(1)["ids"])
    kept = all(torch.equal(a, b) for a, b in zip(average, engine.average.values, strict=True))
    fine = any(bool((v != v.bfloat16()).any()) for v in average)  # bf16 could not hold it
    same = owned_bytes(engine) == masters
    engine.destroy()
    return kept and fine and same


@pytest.mark.parametrize("keys", [MASTERS, BOTH], ids=str)
def test_evaluating_the_average_changes_neither_it_nor_the_masters(ranks, keys) -> None:
    assert all(ranks(2).run(evaluate_the_average, keys))


@pytest.mark.parametrize("key", BOTH)
def test_without_bf16_the_keys_are_an_error(key: str) -> None:
    with pytest.raises(ConfigError, match=f"bf16.{key}"):
        load_engine({"train_batch_size": 1, "bf16": {"enabled": False, key: True}})


def test_fp16_masters_are_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="vanish"):
        load_engine({"train_batch_size": 1, "fp16": {"enabled": True, "fp16_master_weights_and_grads": True}})

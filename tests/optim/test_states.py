"""What each optimizer keeps a parameter, and that checkpoints hold exactly that, for any stage and world size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.optim.training import PARAMS, Case, start
from tests.zero.training import assert_equal_bits, numpy_weights, owned_bytes, train_step

STATES = {
    "SGD": {"momentum_buffer"},
    "Lion": {"exp_avg"},
    "NAdam": {"exp_avg", "exp_avg_sq"},
    "RMSprop": {"square_avg", "momentum_buffer"},
    "Adagrad": {"sum"},
    "AdamW": {"exp_avg", "exp_avg_sq"},
}
SLOW = pytest.mark.slow


def straight(rank: int, world_size: int, case: Case, steps: int, uri: str = ""):
    """Train; save after the second step and at the end where there is a folder."""
    engine, run = start(case), case.run()
    for step in range(1, steps + 1):
        train_step(engine, run, rank, world_size, step)
        if uri and step == 2:
            engine.save_checkpoint(uri, tag="two")
    found = numpy_weights(engine), owned_bytes(engine)
    engine.destroy()
    return found


def resumed(rank: int, world_size: int, case: Case, uri: str, steps: int):
    engine, run = start(case), case.run()
    train_step(engine, run, rank, world_size, 9)  # whatever a load does not overwrite shows
    engine.load_checkpoint(uri, tag="two")
    for step in range(3, steps + 1):
        train_step(engine, run, rank, world_size, step)
    found = numpy_weights(engine), owned_bytes(engine)
    engine.destroy()
    return found


def kinds_by_name(uri: str) -> dict[str, set[str]]:
    from raydz.checkpoint import open_checkpoint
    from raydz.storage import open_store

    found: dict[str, set[str]] = {}
    for name, kind in open_checkpoint(open_store(uri), "two")[1].tensors:
        found.setdefault(name, set()).add(kind)
    return found


@pytest.mark.parametrize("name", [n if n in ("Muon", "SGD") else pytest.param(n, marks=SLOW) for n in PARAMS])
def test_training_goes_on_from_a_checkpoint_as_if_it_had_not_stopped(ranks, tmp_path: Path, name: str) -> None:
    case, uri = Case(name, 3), str(tmp_path)
    wanted = ranks(3).run(straight, case, 4, uri)
    again = ranks(3).run(resumed, case, uri, 4)
    assert [shards for _, shards in again] == [shards for _, shards in wanted]
    assert_equal_bits(again[0][0], wanted[0][0])
    other_stage = ranks(3).run(resumed, case.with_(stage=1, bucket=70), uri, 4)[0][0]
    assert_equal_bits(other_stage, wanted[0][0])
    for world, stage in ((2, 3), (1, 0)):
        fewer = ranks(world).run(resumed, case.with_(stage=stage), uri, 4)[0][0]
        for parameter, weights in wanted[0][0].items():
            np.testing.assert_allclose(fewer[parameter], weights, rtol=0, atol=1.2e-5, err_msg=parameter)


def test_muon_saves_of_each_parameter_only_the_states_it_has(ranks, tmp_path: Path) -> None:
    ranks(3).run(straight, Case("Muon", 2), 2, str(tmp_path))
    for name, kinds in kinds_by_name(str(tmp_path)).items():
        is_matrix = name.startswith("layers.") and name.endswith("weight")
        assert kinds == {"weight"} | ({"momentum_buffer"} if is_matrix else {"exp_avg", "exp_avg_sq"}), name


@pytest.mark.parametrize("name", STATES)
def test_elementwise_ones_save_their_states_for_all(ranks, tmp_path: Path, name: str) -> None:
    ranks(1).run(straight, Case(name, 0), 2, str(tmp_path))
    assert {frozenset(kinds) for kinds in kinds_by_name(str(tmp_path)).values()} == {
        frozenset(STATES[name] | {"weight"})
    }


def state_numels(rank: int, world_size: int, case: Case) -> tuple[dict[str, int], int]:
    engine = start(case)
    numels: dict[str, int] = {}
    for states in engine.optimizer.states:
        for name, tensor in states.items():
            numels[name] = numels.get(name, 0) + tensor.numel()
    owned = sum(group.owned[1] - group.owned[0] for group in engine.optimizer.groups)
    engine.destroy()
    return numels, owned


@pytest.mark.parametrize(("stage", "world"), [(0, 1), (3, 3)])
def test_muon_keeps_one_number_for_an_element_of_a_matrix(ranks, stage: int, world: int) -> None:
    found = ranks(world).run(state_numels, Case("Muon", stage))
    matrices, blocks_rest = 2 * 2 * 60, 2 * 10  # two blocks of (10, 6) and (6, 10), and a bias of 10
    ends, norm = 2 * 42, 2 * 6
    momentum = sum(numels.get("momentum_buffer", 0) for numels, _ in found)
    moments = sum(numels.get("exp_avg", 0) for numels, _ in found)
    # Padding: up to 16 elements a parameter or shard.
    assert matrices <= momentum <= matrices + 4 * 16 * world
    assert blocks_rest + ends + norm <= moments <= blocks_rest + ends + norm + 6 * 16 * world
    for numels, owned in found:
        assert numels.get("momentum_buffer", 0) + numels.get("exp_avg", 0) <= owned
        assert numels.get("exp_avg") == numels.get("exp_avg_sq")

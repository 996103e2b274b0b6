"""What one stage and world size saved, any other loads bit for bit, and reads no more than it needs."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.checkpoint.states import (
    CHUNK,
    Odd,
    Setup,
    assert_same_bits,
    build,
    load_and_save,
    only_checkpoint,
    stored_pieces,
    stored_tensors,
    train,
    train_and_save,
)

SHAPES = st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=6).map(tuple)
SETUPS = st.fixed_dictionaries(
    {
        "shapes": SHAPES,
        "tied": st.booleans(),
        "stages": st.tuples(st.integers(0, 3), st.integers(0, 3)),
        "worlds": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "buckets": st.tuples(*[st.sampled_from([None, 1, 40])] * 2),
        "bf16": st.tuples(st.booleans(), st.booleans()),
    }
)


def check_resharding(ranks, case: dict) -> None:
    before, after = (
        Setup(stage=case["stages"][i], shapes=case["shapes"], tied=case["tied"], bf16=case["bf16"][i],
              bucket=case["buckets"][i])
        for i in (0, 1)
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        first, second = Path(folder, "first"), Path(folder, "second")
        saved = ranks(case["worlds"][0]).run(train_and_save, before, str(first), 2)
        loaded = ranks(case["worlds"][1]).run(load_and_save, after, str(first), str(second))
        tensors = stored_tensors(only_checkpoint(first))
        assert_same_bits(stored_tensors(only_checkpoint(second)), as_held_in(case["bf16"][1], tensors))
        assert {rank["steps"] for rank in saved + loaded} == {2}
        assert_whole_state_fits(tensors, saved[0]["weights"], case)
        assert_same_bits(loaded[0]["weights"], as_held_in(case["bf16"][1], saved[0]["weights"]))
        pieces = stored_pieces(only_checkpoint(first))
        for rank in loaded:
            for name, values in rank["shown"].items():
                np.testing.assert_array_equal(values, as_computed_with(case["bf16"][1], loaded[0]["weights"][name]))
        own = sum(chunks_that_hold(pieces, rank["held"][False]) for rank in loaded)
        alike = chunks_that_hold(pieces, loaded[0]["held"][True])  # by every rank, and read by one
        assert sum(rank["bytes"] for rank in loaded) == own + alike


def as_held_in(bf16: bool, tensors: dict) -> dict:
    """The same values; a frozen parameter has no master, so an engine that computes in bf16 holds it rounded."""
    if not bf16:
        return tensors
    rounded = {k: torch.from_numpy(v).bfloat16().float().numpy() for k, v in tensors.items() if "frozen" in k}
    return tensors | rounded


def as_computed_with(bf16: bool, master: np.ndarray) -> np.ndarray:
    """What a forward sees of a master: in bf16, the nearest one."""
    return torch.from_numpy(master).bfloat16().float().numpy() if bf16 else master


def assert_whole_state_fits(tensors: dict, weights: dict, case: dict) -> None:
    """The files hold what the engine itself gathers, and moments that are not the zeros of the start."""
    for (kind, name), values in tensors.items():
        if kind in ("weight", "buffer"):
            assert weights[name].tobytes() == values.tobytes(), name
        elif name != "frozen" and values.size > 1:
            assert np.count_nonzero(values) >= values.size - 1, (kind, name)
    assert int(tensors["buffer", "seen"][0]) == 1002
    assert ("weight", "first.twin") not in tensors, "a tied parameter is stored once"


def chunks_that_hold(pieces, held) -> int:
    """Bytes of the chunks in which the elements a rank holds lie; the last chunk of a file may be short."""
    touched = set()
    for kind, names, start, stop in held:
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, piece.stop)
            if piece.kind != kind or piece.name not in names or low >= high:
                continue
            width = (piece.high - piece.low) // (piece.stop - piece.start)
            first = piece.low + (low - piece.start) * width
            last = piece.low + (high - piece.start) * width - 1
            touched |= {(piece.file, chunk) for chunk in range(first // CHUNK, last // CHUNK + 1)}
    return sum(min(CHUNK, file.stat().st_size - chunk * CHUNK) for file, chunk in touched)


@given(case=SETUPS)
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    phases=(Phase.reuse, Phase.generate),  # a failure ends the ranks' processes: shrinking would take minutes
)
def test_any_stage_and_world_size_load_what_any_other_saved(ranks, case):
    check_resharding(ranks, case)


@pytest.mark.parametrize(
    ("stages", "worlds", "bf16"),
    [((3, 0), (3, 1), (True, False)), ((0, 3), (2, 3), (False, True)), ((2, 1), (1, 2), (True, True))],
)
def test_bf16_masters_pass_through_fp32_and_back(ranks, stages, worlds, bf16):
    case = {
        "shapes": Setup().shapes, "tied": True, "stages": stages, "worlds": worlds, "bf16": bf16, "buckets": (None, 40),
    }  # fmt: skip
    check_resharding(ranks, case)


def test_moments_are_those_of_plain_torch(ranks, tmp_path):
    ranks(3).run(train_and_save, Setup(stage=3), str(tmp_path), 3)
    stored = stored_tensors(tmp_path)
    model = Odd(Setup().shapes, tied=False)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for p in parameters.values() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    for step in range(1, 4):
        optimizer.zero_grad()
        model(torch.full((2,), 1.0 + 0.1 * step)).backward()
        torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
        optimizer.step()
    for name, parameter in parameters.items():
        if parameter.numel():
            state = optimizer.state[parameter]
            np.testing.assert_allclose(stored["weight", name], parameter.detach().flatten(), rtol=1e-5, atol=1e-6)
            for kind in ("exp_avg", "exp_avg_sq"):
                np.testing.assert_allclose(stored[kind, name], state[kind].flatten(), rtol=1e-4, atol=1e-9)


def continue_training(rank, world_size, setup, uri, steps):
    engine = build(setup)
    if uri:
        engine.load_checkpoint(uri)
    train(engine, engine.global_steps + 1, steps)
    state = {name: tensor.float().numpy().copy() for name, tensor in engine.full_state_dict().items()}
    engine.destroy()
    return state


@pytest.mark.parametrize("bf16", [False, True])
def test_training_goes_on_as_if_it_had_not_stopped(ranks, tmp_path, bf16):
    setup = Setup(stage=3, bf16=bf16)
    ranks(2).run(train_and_save, setup, str(tmp_path), 2)
    whole = ranks(2).run(continue_training, setup, None, 4)[0]
    resumed = ranks(2).run(continue_training, setup, str(tmp_path), 4)[0]
    whole["seen"] = resumed["seen"]  # set by hand before the save
    assert_same_bits(resumed, whole)


def test_client_state_and_counters_come_back(ranks, tmp_path):
    ranks(2).run(train_and_save, Setup(stage=1), str(tmp_path), 2)
    engine = build(Setup())
    uri, client_state = engine.load_checkpoint(tmp_path)
    assert client_state == {"epoch": 3}
    assert uri == f"{tmp_path}/step-0000000002"
    assert (engine.global_steps, engine.micro_steps, engine.skipped_steps) == (2, 2, 0)
    engine.destroy()


def test_load_within_accumulation_drops_the_half_made_gradient(tmp_path):
    setup = Setup(accumulation=2)
    train_and_save(0, 1, setup, str(tmp_path), 1)
    states = []
    for has_half_a_step in (True, False):
        engine = build(setup)
        if has_half_a_step:
            engine.backward(engine(torch.full((2,), 9.0)))
            engine.step()
        engine.load_checkpoint(tmp_path)
        train(engine, 2, 2)
        states.append({name: tensor.numpy().copy() for name, tensor in engine.full_state_dict().items()})
        engine.destroy()
    assert_same_bits(*states)

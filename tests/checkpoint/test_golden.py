"""What earlier releases wrote, this one reads: `golden/` is format 1, `golden_2/` format 2; both stay as they are."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from tests.checkpoint.golden_model import (
    CLIENT_STATE,
    GOLDEN,
    GOLDEN_2,
    KINDS,
    SHAPES,
    STEP,
    build_golden,
    golden_values,
    set_golden_values,
    write,
)
from tests.checkpoint.states import assert_same_bits, data_files, stored_tensors


def load_golden(rank, world_size, folder, stage, bf16):
    """Client state, counters, whole weights, and every optimizer state this rank owns with its true values."""
    engine = build_golden(stage, bf16)
    _, client_state = engine.load_checkpoint(folder)
    counters = (engine.global_steps, engine.micro_steps, engine.skipped_steps)
    loaded = [{k: v.numpy().copy() for k, v in state.items()} for state in engine.optimizer.states]
    weights = {name: tensor.numpy().copy() for name, tensor in engine.full_state_dict().items()}
    set_golden_values(engine)
    true = [{k: v.numpy().copy() for k, v in state.items()} for state in engine.optimizer.states]
    engine.destroy()
    return client_state, counters, weights, loaded, true


@pytest.mark.parametrize("folder", [GOLDEN, GOLDEN_2], ids=["format 1", "format 2"])
@pytest.mark.parametrize(("world_size", "stage", "bf16"), [(1, 0, False), (2, 3, True), (3, 1, False)])
def test_golden_checkpoint_holds_the_constants(ranks, folder, world_size, stage, bf16):
    results = ranks(world_size).run(load_golden, folder, stage, bf16)
    for client_state, counters, _, loaded, true in results:
        assert client_state == CLIENT_STATE
        assert counters == (STEP, 8, 1)
        for found, wanted in zip(loaded, true, strict=True):
            assert_same_bits(found, wanted)
    weights = results[0][2]
    for name, shape in SHAPES.items():
        np.testing.assert_array_equal(weights[name], golden_values("weight", name).reshape(shape))
    np.testing.assert_array_equal(weights["seen"], [7, -(2**40)])


@pytest.mark.parametrize(("folder", "version", "algorithm"), [(GOLDEN, 1, "crc32"), (GOLDEN_2, 2, "crc32c")])
def test_golden_files_are_still_what_was_committed(folder, version, algorithm):
    (manifest,) = folder.rglob("manifest.json")
    body = json.loads(manifest.read_bytes())["body"]
    assert (body["format_version"], body["step"], body["world_size"]) == (version, STEP, 2)
    assert {file["algorithm"] for file in body["files"]} == {algorithm}
    digests = [hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in data_files(folder)]
    assert digests == ["61236a0ab0630de1", "12273937fece44b3"]
    tensors = stored_tensors(folder)
    assert set(tensors) == {(kind, name) for kind in KINDS for name in SHAPES} | {("buffer", "seen")}
    for (kind, name), values in tensors.items():
        if kind != "buffer":
            np.testing.assert_array_equal(values, golden_values(kind, name))


def test_this_release_writes_the_same_data_files(ranks, tmp_path):
    ranks(2).run(write, str(tmp_path))
    for old, new in zip(data_files(GOLDEN), data_files(tmp_path), strict=True):
        assert old.read_bytes() == new.read_bytes()

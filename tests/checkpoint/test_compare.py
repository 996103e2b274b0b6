"""Differences between checkpoints: against numpy on what the safetensors library reads from both."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from raydz.checkpoint import compare as module
from raydz.checkpoint import open_checkpoint
from raydz.checkpoint.compare import Side, compare, distance
from raydz.errors import CheckpointError
from raydz.storage.local import LocalStore
from tests.checkpoint.states import Setup, data_files, load_and_save, only_checkpoint, stored_tensors, train_and_save


@pytest.fixture(scope="module")
def runs(ranks, tmp_path_factory) -> dict[str, Path]:
    """Two ranks under stage 3 after 2 and after 3 steps; the first one again from one rank under stage 1; another."""
    root = tmp_path_factory.mktemp("runs")
    for steps in (2, 3):
        ranks(2).run(train_and_save, Setup(stage=3), str(root / f"steps{steps}"), steps)
    load_and_save(0, 1, Setup(stage=1), str(root / "steps2"), str(root / "resharded"))
    shapes = (*Setup().shapes[:2], (7, 10), *Setup().shapes[3:], (2, 2))
    train_and_save(0, 1, Setup(shapes=shapes), str(root / "other"), 2)
    train_and_save(0, 1, Setup(bf16=True), str(root / "bf16"), 2)
    return {path.name: path for path in root.iterdir()}


def side(root: Path) -> Side:
    store = LocalStore(root)
    return Side(store, *open_checkpoint(store))


def test_a_resharded_checkpoint_is_equal(runs):
    found = compare(side(runs["steps2"]), side(runs["resharded"]))
    assert found.is_equal and found.differences == []
    assert found.num_tensors == len(stored_tensors(runs["steps2"]))


@pytest.mark.parametrize("batch_bytes", [64, 1 << 20])
def test_distances_are_those_of_numpy(runs, monkeypatch, batch_bytes):
    monkeypatch.setattr(module, "_BATCH_BYTES", batch_bytes)
    seen = []
    found = compare(side(runs["steps2"]), side(runs["steps3"]), done=seen.append)
    a, b = stored_tensors(runs["steps2"]), stored_tensors(runs["steps3"])
    wanted = {}
    for (kind, name), first in a.items():
        gap = np.abs(first.astype(np.float64) - b[kind, name].astype(np.float64))
        if gap.size and gap.max() > 0:
            wanted[name, kind] = (int((first != b[kind, name]).sum()), float(gap.max()), first.size)
    told = {(d.name, d.kind): (d.num_different, d.max_abs, d.num_elements) for d in found.differences}
    assert told == wanted and len(wanted) > 10
    assert all(item.what == "values" for item in found.differences)
    assert found.state == ["engine"]
    assert sum(seen) == sum(first.nbytes + b[key].nbytes for key, first in a.items())


def test_missing_tensors_and_other_shapes_are_named(runs):
    found = compare(side(runs["steps2"]), side(runs["other"]), ["p2", "p6", "weight/first.p1"])
    told = [(item.name, item.kind, item.what, item.a, item.b) for item in found.differences if item.what != "values"]
    kinds = ("exp_avg", "exp_avg_sq", "weight")
    assert told == [
        *(("p2", kind, "shape", "F32 [10, 7]", "F32 [7, 10]") for kind in kinds),
        *(("p6", kind, "only in B", None, "F32 [2, 2]") for kind in kinds),
    ]
    back = compare(side(runs["other"]), side(runs["steps2"]), ["p6"])
    assert [(item.what, item.a, item.b) for item in back.differences] == [("only in A", "F32 [2, 2]", None)] * 3


def test_dtypes_that_differ_are_compared_by_value(runs):
    found = compare(side(runs["steps2"]), side(runs["bf16"]), ["frozen"])
    (item,) = found.differences
    a, b = (stored_tensors(runs[name])["weight", "frozen"].astype(np.float64) for name in ("steps2", "bf16"))
    assert (item.what, item.a, item.b) == ("dtype", "F32 [5]", "BF16 [5]")
    assert (item.num_different, item.max_abs) == (int((a != b).sum()), float(np.abs(a - b).max()))


def test_patterns_choose(runs):
    found = compare(side(runs["steps2"]), side(runs["steps3"]), ["weight/p*"])
    assert {item.kind for item in found.differences} == {"weight"}
    assert {item.name for item in found.differences} <= {"p0", "p2", "p4"}
    with pytest.raises(CheckpointError, match="matches no tensor") as caught:
        compare(side(runs["steps2"]), side(runs["steps3"]), ["p*", "q*"])
    assert caught.value.got == "q*"


def test_damage_is_an_error_and_no_difference(runs, tmp_path):
    shutil.copytree(runs["steps3"], tmp_path / "run")
    path = data_files(tmp_path / "run")[0]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="checksum does not fit"):
        compare(side(runs["steps2"]), side(tmp_path / "run"))


def test_a_tied_name_meets_its_other_name(tmp_path):
    train_and_save(0, 1, Setup(tied=True), str(tmp_path / "run"), 1)
    mine = side(tmp_path / "run")
    aliases = mine.manifest.aliases
    assert aliases, json.dumps(aliases)
    (alias, stored), *_ = aliases.items()
    shutil.copytree(only_checkpoint(tmp_path / "run"), tmp_path / "copy")
    other = side(tmp_path / "copy")
    for kind in ("weight", "exp_avg", "exp_avg_sq"):
        entry = other.manifest.tensors.pop((stored, kind))
        other.manifest.tensors[alias, kind] = type(entry)(alias, kind, entry.dtype, entry.shape, entry.pieces)
    other.manifest.aliases.pop(alias)
    other.manifest.aliases[stored] = alias
    assert compare(mine, other).is_equal
    assert compare(other, mine).is_equal


@pytest.mark.parametrize(
    ("first", "second", "wanted"),
    [
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], (0, 0.0)),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 0.0], (2, 3.0)),
        ([0.0], [-0.0], (1, 0.0)),
        ([float("nan"), 1.0], [float("nan"), 1.0], (0, 0.0)),
        ([float("nan")], [1.0], (1, float("inf"))),
        ([float("inf"), 1.0], [float("inf"), 2.0], (1, 1.0)),
        ([float("inf")], [float("-inf")], (1, float("inf"))),
        ([], [], (0, 0.0)),
    ],
)
def test_distance(first, second, wanted):
    assert distance(torch.tensor(first), torch.tensor(second)) == wanted


def test_distance_of_many_elements_is_that_of_numpy():
    generator = np.random.default_rng(0)
    first = generator.standard_normal(300_000).astype(np.float32)
    second = np.where(generator.random(300_000) < 0.1, first * np.float32(1.5), first)
    second[299_999] = 100
    gap = np.abs(first.astype(np.float64) - second.astype(np.float64))
    wanted = int((first != second).sum()), float(gap.max())
    assert distance(torch.from_numpy(first), torch.from_numpy(second)) == wanted
    second[:70_000] = first[:70_000] = np.nan
    wanted = int((first[70_000:] != second[70_000:]).sum()), float(gap[70_000:].max())
    assert distance(torch.from_numpy(first), torch.from_numpy(second)) == wanted


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int64, torch.bfloat16, torch.float64])
def test_distance_takes_every_dtype(dtype):
    first, second = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([0, 0, 1]).to(dtype)
    assert distance(first, second) == (1, 1.0)
    assert distance(first, second.float()) == (1, 1.0)

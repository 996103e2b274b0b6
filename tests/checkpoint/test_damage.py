"""Damaged checkpoints: every load says which file and chunk, and what is missing or short changes nothing."""

from __future__ import annotations

import io
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from raydz.errors import CheckpointError
from tests.checkpoint.states import (
    CHUNK,
    Setup,
    assert_same_bits,
    build,
    data_files,
    only_checkpoint,
    stored_pieces,
    train,
    train_and_save,
)

SETUP = Setup(stage=2)


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks(2).run(train_and_save, SETUP, str(root), 2)
    return root


@pytest.fixture
def saved(pristine, tmp_path) -> Path:
    """A copy of a checkpoint of two ranks, to be damaged."""
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def try_to_load(rank, world_size, setup, uri):
    """The error's class and fields, and whether the engine is bit for bit as before."""
    engine = build(setup)
    train(engine, 1, 1)
    before = whole_state(engine)
    try:
        engine.load_checkpoint(uri)
    except CheckpointError as error:
        found = {"what": error.what, "where": error.where, "got": str(error.got)}
    else:
        found = None
    after = whole_state(engine)
    engine.destroy()
    return found, all(torch.equal(after[key], before[key]) for key in before)


def whole_state(engine) -> dict[str, torch.Tensor]:
    """All that this rank owns, straight from the engine's buffers, and its counters."""
    state = {f"weight {g.index}": g.weights.master().clone() for g in engine.sharded.groups}
    for i, moments in enumerate(engine.optimizer.states):
        state |= {f"{name} {i}": tensor.clone() for name, tensor in moments.items()}
    state |= {f"buffer {name}": buffer.clone() for name, buffer in engine.module.named_buffers()}
    return state | {"steps": torch.tensor(engine.global_steps)}


def load_alone(uri) -> tuple[dict | None, bool]:
    return try_to_load(0, 1, Setup(), str(uri))


def test_undamaged_copy_loads(saved):
    assert load_alone(saved)[0] is None


@pytest.mark.parametrize("where", ["first", "middle", "last"])
@pytest.mark.parametrize("file", [0, 1])
def test_flipped_bit_is_named_by_file_and_chunk(saved, file, where):
    path = data_files(saved)[file]
    data = bytearray(path.read_bytes())
    held = [piece for piece in stored_pieces(saved) if piece.file == path]
    position = {"first": held[0].low, "middle": held[len(held) // 2].low, "last": len(data) - 1}[where]
    data[position] ^= 0x10
    path.write_bytes(data)
    found, _ = load_alone(saved)
    assert "checksum" in found["what"]
    assert found["where"].endswith(f"{path.relative_to(only_checkpoint(saved))}, chunk {position // CHUNK}")


def test_flipped_bit_reaches_every_rank_as_the_same_error(ranks, saved):
    path = data_files(saved)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    results = ranks(3).run(try_to_load, SETUP, str(saved))
    assert results[0][0]["where"].endswith(f"chunk {(len(data) - 1) // CHUNK}")
    assert len({str(found) for found, _ in results}) == 1


@pytest.mark.parametrize("change", [-1, -CHUNK, 1])
@pytest.mark.parametrize("file", [0, 1])
def test_file_of_another_size_changes_nothing(saved, file, change):
    path = data_files(saved)[file]
    data = path.read_bytes()
    path.write_bytes(data[:change] if change < 0 else data + b"\0")
    found, is_untouched = load_alone(saved)
    assert "wrong size" in found["what"] and path.name in found["where"]
    assert found["got"] == f"{len(data) + change} bytes"
    assert is_untouched


@pytest.mark.parametrize("file", [0, 1])
def test_missing_file_changes_nothing(saved, file):
    path = data_files(saved)[file]
    path.unlink()
    found, is_untouched = load_alone(saved)
    assert "missing" in found["what"] and path.name in found["where"]
    assert is_untouched


def test_missing_file_leaves_every_rank_as_it_was(ranks, saved):
    data_files(saved)[0].unlink()
    results = ranks(2).run(try_to_load, SETUP, str(saved))
    assert results[0][0] is not None and results[0][0] == results[1][0]


def test_swapped_files_are_noticed(saved):
    first, second = data_files(saved)
    contents = [path.read_bytes() for path in (first, second)]
    first.write_bytes(contents[1][: len(contents[0])].ljust(len(contents[0])))  # their sizes may differ
    second.write_bytes(contents[0][: len(contents[1])].ljust(len(contents[1])))
    found, _ = load_alone(saved)
    assert "checksum" in found["what"] and first.name in found["where"]


def test_model_with_another_shape_changes_nothing(saved):
    other = Setup(shapes=(*SETUP.shapes[:2], (7, 10), *SETUP.shapes[3:]))
    found, is_untouched = try_to_load(0, 1, other, str(saved))
    assert "another shape" in found["what"] and found["got"] == "(10, 7)"
    assert is_untouched


def test_model_with_more_tensors_is_refused_by_name(saved):
    found, is_untouched = try_to_load(0, 1, Setup(shapes=(*SETUP.shapes, (2,))), str(saved))
    assert "lacks tensors" in found["what"] and "p6 (weight)" in found["got"] and "3 missing" in found["got"]
    assert is_untouched


class Bomb:
    """Its unpickling would leave a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return Path.touch, (self.mark,)


def test_planted_pickles_are_never_opened(saved, tmp_path):
    mark = tmp_path / "exploded"
    body = io.BytesIO()
    torch.save(Bomb(mark), body)
    folder = only_checkpoint(saved)
    attempt = data_files(saved)[0].parent
    for place in (saved, folder, attempt):
        for name in ("pytorch_model.bin", "data.pkl", "rank-00000-of-00002.pt", ".metadata", "latest"):
            (place / name).write_bytes(body.getvalue())
    assert load_alone(saved)[0] is None
    for path in (data_files(saved)[0], folder / "manifest.json"):
        path.write_bytes(pickle.dumps(Bomb(mark)))
        assert load_alone(saved)[0] is not None
    assert not mark.exists()
    torch.load(io.BytesIO(body.getvalue()), weights_only=False)
    assert mark.exists(), "the bomb must work, or this test proves nothing"


def test_checkpoint_without_manifest_does_not_exist(saved):
    (only_checkpoint(saved) / "manifest.json").unlink()
    found, is_untouched = load_alone(saved)
    assert "no committed checkpoint" in found["what"] and is_untouched


def test_load_after_a_failed_one_is_whole(saved, pristine):
    engine = build(Setup())
    path = data_files(saved)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError):
        engine.load_checkpoint(saved)
    engine.load_checkpoint(pristine)
    twin = build(Setup())
    twin.load_checkpoint(pristine)
    states = [{k: v.numpy() for k, v in whole_state(e).items()} for e in (engine, twin)]
    assert_same_bits(*states)
    engine.destroy()
    twin.destroy()

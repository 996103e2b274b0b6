"""Which checkpoint is found: committed ones alone, the newest or exactly the named one."""

from __future__ import annotations

import pytest

from raydz.checkpoint import checkpoint_uri, committed_steps, find_checkpoint, open_checkpoint, step_folder
from raydz.errors import CheckpointError
from raydz.storage import open_store
from tests.checkpoint.test_manifest import WHOLE, manifest_of


def commit(store, folder, step):
    store.put(f"{folder}/manifest.json", manifest_of([(0, 12, 0, 0)], step=step).to_bytes())


@pytest.fixture
def store(tmp_path):
    store = open_store(str(tmp_path / "run"))
    commit(store, "step-0000000009", 9)
    commit(store, "step-0000000010", 10)
    store.put("step-0000000011/abcd/rank-00000-of-00001.safetensors", b"torn")
    commit(store, "step-12", 12)
    commit(store, "best", 3)
    return store


def test_folders_sort_by_step():
    steps = [0, 1, 9, 10, 99, 10**6, 10**10 - 1]
    assert sorted(map(step_folder, reversed(steps))) == [step_folder(step) for step in steps]


def test_uncommitted_and_foreign_folders_are_invisible(store):
    assert committed_steps(store) == [9, 10]
    assert find_checkpoint(store) == "step-0000000010"
    assert open_checkpoint(store)[1].step == 10


def test_named_checkpoint_is_the_one_that_opens(store):
    assert open_checkpoint(store, "best")[1].step == 3
    assert open_checkpoint(store, "step-0000000009")[0] == "step-0000000009"


def test_uri_may_name_the_checkpoint_itself(store):
    uri = checkpoint_uri(store, "step-0000000009")
    folder, manifest = open_checkpoint(open_store(uri))
    assert (folder, manifest.step) == ("", 9)
    assert checkpoint_uri(open_store(uri), folder) == uri


def test_run_one_folder_below_is_found_by_its_name(store, tmp_path):
    above = open_store(str(tmp_path))
    assert find_checkpoint(above) is None
    assert open_checkpoint(above, "run")[0] == "run/step-0000000010"


@pytest.mark.parametrize("folder", ["step-0000000011", "nowhere", ""])
def test_folder_without_a_manifest_is_refused_by_name(tmp_path, store, folder):
    empty = open_store(str(tmp_path / "empty")) if not folder else store
    with pytest.raises(CheckpointError, match="no committed checkpoint") as caught:
        open_checkpoint(empty, folder)
    assert caught.value.where == checkpoint_uri(empty, folder)


def test_damaged_newest_manifest_is_an_error_and_not_passed_over(store):
    data = bytearray(WHOLE.to_bytes())
    data[data.index(b'"step"') + 8] ^= 1
    store.put("step-0000000010/manifest.json", bytes(data))
    with pytest.raises(CheckpointError, match="damaged") as caught:
        open_checkpoint(store)
    assert "step-0000000010/manifest.json" in caught.value.where

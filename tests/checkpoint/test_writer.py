"""Saving: committed by the manifest alone, the same error on every rank, and never at the cost of an older one."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from raydz.errors import CheckpointError, StorageError, TrainingError
from raydz.storage import StoreUnavailable
from raydz.storage.local import LocalStore
from tests.checkpoint.states import Setup, build, data_files, only_checkpoint, stored_tensors, train, train_and_save

SETUP = Setup(stage=1)


def keys(root: Path) -> list[str]:
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


# -- layout -----------------------------------------------------------------------------------------------------------


def test_folder_of_a_save_is_laid_out_as_the_readme_says(ranks, tmp_path):
    ranks(2).run(train_and_save, SETUP, str(tmp_path), 2)
    found = keys(tmp_path)
    attempt = found[0].split("/")[1]
    assert re.fullmatch(r"[0-9a-f]{8}", attempt)
    assert found == [
        f"step-0000000002/{attempt}/rank-00000-of-00002.safetensors",
        f"step-0000000002/{attempt}/rank-00001-of-00002.safetensors",
        "step-0000000002/manifest.json",
    ]


class Order(LocalStore):
    """Notes the order in which objects are committed."""

    def __init__(self, root):
        super().__init__(root)
        self.order: list[tuple[str, bool]] = []

    def writer(self, key, expected_bytes=None):
        self.order.append((key, False))
        return super().writer(key, expected_bytes)

    def put(self, key, data, *, if_absent=False):
        assert all(self.exists(other) for other, _ in self.order)
        self.order.append((key, if_absent))
        super().put(key, data, if_absent=if_absent)


def test_manifest_is_put_last_and_only_if_absent(tmp_path):
    engine, store = build(SETUP), Order(tmp_path)
    engine.save_to(store, "a", step=0, state={})
    assert [if_absent for _, if_absent in store.order] == [False, True]
    assert store.order[-1][0] == "a/manifest.json"
    engine.destroy()


# -- failures ---------------------------------------------------------------------------------------------------------


class Failing(LocalStore):
    """A store that fails at one point of a save."""

    def __init__(self, root, fails_at: str) -> None:
        super().__init__(root)
        self.fails_at = fails_at

    def writer(self, key, expected_bytes=None):
        writer = super().writer(key, expected_bytes)
        if self.fails_at == "write":
            writer.write = self._refuse
        return writer

    def put(self, key, data, *, if_absent=False):
        if self.fails_at == "put":
            self._refuse()
        super().put(key, data, if_absent=if_absent)
        if self.fails_at == "lost reply":
            self._refuse()

    def head(self, key):
        return None if self.fails_at == "head" and key.endswith("safetensors") else super().head(key)

    def _refuse(self, *_):
        raise StoreUnavailable("the bucket is on fire", where=self.uri)


def save_with_a_fault(rank, world_size, root, bad_rank, fails_at):
    """What each rank is told when one of them fails."""
    engine = build(SETUP)
    train(engine, 1, 1)
    engine.save_checkpoint(root)
    train(engine, 2, 2)
    store = Failing(root, fails_at) if rank == bad_rank else LocalStore(root)
    try:
        engine.save_to(store, "step-0000000002", step=2, state={})
    except CheckpointError as error:
        found = str(error)
    else:
        found = "saved"
    train(engine, 3, 3)  # it goes on
    engine.save_checkpoint(root, client_state={})
    engine.destroy()
    return found


@pytest.mark.parametrize(("bad_rank", "fails_at"), [(0, "write"), (1, "write"), (2, "write"), (0, "head")])
def test_one_rank_that_fails_gives_every_rank_the_same_error_and_leaves_nothing(ranks, tmp_path, bad_rank, fails_at):
    told = ranks(3).run(save_with_a_fault, str(tmp_path), bad_rank, fails_at)
    assert len(set(told)) == 1
    assert "not saved" in told[0] and f"rank {bad_rank}" in told[0]
    assert {key.split("/")[0] for key in keys(tmp_path)} == {"step-0000000001", "step-0000000003"}


@pytest.mark.parametrize("fails_at", ["put", "lost reply"])
def test_files_stay_when_nobody_knows_whether_the_manifest_came(ranks, tmp_path, fails_at):
    told = ranks(2).run(save_with_a_fault, str(tmp_path), 0, fails_at)
    assert len(set(told)) == 1 and "on fire" in told[0]
    kept = [key for key in keys(tmp_path) if key.startswith("step-0000000002/")]
    assert len([key for key in kept if key.endswith(".safetensors")]) == 2
    assert ("step-0000000002/manifest.json" in kept) == (fails_at == "lost reply")
    if fails_at == "lost reply":  # whatever is committed can be loaded
        assert stored_tensors(tmp_path / "step-0000000002")
        engine = build(Setup())
        engine.load_checkpoint(tmp_path, "step-0000000002")
        engine.destroy()


def save_where_a_file_is_in_the_way(rank, world_size, root):
    engine = build(SETUP)
    try:
        engine.save_checkpoint(root)
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_path_that_cannot_be_written_is_named_on_every_rank(ranks, tmp_path):
    (tmp_path / "file").write_text("in the way")
    told = ranks(2).run(save_where_a_file_is_in_the_way, str(tmp_path / "file" / "run"))
    assert told[0] == told[1]
    assert "ENOTDIR" in told[0] and "rank 0" in told[0] and "rank 1" in told[0]


def test_state_that_is_no_json_is_refused_before_anything_is_committed(tmp_path):
    engine = build(SETUP)
    with pytest.raises(CheckpointError, match="not saved") as caught:
        engine.save_checkpoint(tmp_path, client_state={"when": torch.zeros(1)})
    assert "JSON" in str(caught.value) and keys(tmp_path) == []
    engine.destroy()


def save_a_state_that_is_no_json(rank, world_size, root):
    engine = build(SETUP)
    try:
        engine.save_checkpoint(root, client_state={"when": object()} if rank == 0 else {})
    except CheckpointError as error:
        return str(error)
    finally:
        engine.destroy()


def test_state_that_only_rank_0_cannot_write_is_every_ranks_error(ranks, tmp_path):
    told = ranks(2).run(save_a_state_that_is_no_json, str(tmp_path))
    assert told[0] == told[1] and "JSON" in told[0] and keys(tmp_path) == []


def test_save_within_accumulation_is_refused(tmp_path):
    engine = build(Setup(accumulation=2))
    engine.backward(engine(torch.ones(2)))
    engine.step()
    with pytest.raises(TrainingError, match="within accumulation"):
        engine.save_checkpoint(tmp_path)
    assert keys(tmp_path) == []
    engine.backward(engine(torch.ones(2)))
    engine.step()
    engine.save_checkpoint(tmp_path)
    engine.destroy()


# -- races ------------------------------------------------------------------------------------------------------------


class Late(LocalStore):
    """Another attempt commits just before this one does."""

    def __init__(self, root, rival) -> None:
        super().__init__(root)
        self.rival = rival

    def put(self, key, data, *, if_absent=False):
        self.rival()
        super().put(key, data, if_absent=if_absent)


def save_twice_at_once(rank, world_size, root):
    engine = build(Setup(stage=2))
    train(engine, 1, 1)
    # Rank 0 commits: its rival is a whole save of one process, from another attempt.
    store = Late(root, lambda: commit_alone(root)) if rank == 0 else LocalStore(root)
    engine.save_to(store, "step-0000000001", step=1, state={})
    engine.destroy()


def commit_alone(root) -> None:
    """One process's attempt, in a process of its own."""
    code = (
        "from tests.checkpoint.states import *; "
        f"e = build(Setup(lr=0.5)); train(e, 1, 1); e.save_checkpoint({str(root)!r}); e.destroy()"
    )
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([sys.executable, "-c", code], check=True, env=alone)


def test_of_two_attempts_one_commits_and_the_losers_files_go(ranks, tmp_path):
    ranks(2).run(save_twice_at_once, str(tmp_path))
    found = keys(tmp_path)
    assert len(found) == 2 and found[-1] == "step-0000000001/manifest.json"
    assert found[0].endswith("rank-00000-of-00001.safetensors"), "the file that is left is the winner's"
    engine, twin = build(Setup()), build(Setup(lr=0.5))
    engine.load_checkpoint(tmp_path)
    train(twin, 1, 1)
    assert torch.equal(engine.full_state_dict()["p0"], twin.full_state_dict()["p0"])
    engine.destroy()
    twin.destroy()


def test_checkpoint_of_another_step_is_never_replaced_in_silence(tmp_path):
    engine = build(SETUP)
    train(engine, 1, 1)
    engine.save_checkpoint(tmp_path, tag="best")
    before = {path: (tmp_path / path).read_bytes() for path in keys(tmp_path)}
    train(engine, 2, 2)
    with pytest.raises(CheckpointError, match="not saved") as caught:
        engine.save_checkpoint(tmp_path, tag="best")
    assert "step 1" in str(caught.value)
    assert {path: (tmp_path / path).read_bytes() for path in keys(tmp_path)} == before
    engine.destroy()


# -- a torn save ------------------------------------------------------------------------------------------------------

_TORN = """
import sys, time
from raydz.checkpoint import data_file
from tests.checkpoint.states import Setup, build, train
engine = build(Setup(shapes=((300, 300),)))
train(engine, 1, 1)
engine.save_checkpoint(sys.argv[1])
train(engine, 2, 2)
data_file._WRITE_BYTES = 4096
usual = data_file.ChunkSums.update
def slow(self, data):
    time.sleep(0.05)
    usual(self, data)
data_file.ChunkSums.update = slow
print("writing", flush=True)
engine.save_checkpoint(sys.argv[1])
"""


def test_process_killed_while_it_writes_leaves_the_checkpoint_before_it(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", _TORN, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "writing\n"
    torn = tmp_path / "step-0000000002"
    deadline = time.monotonic() + 30
    while not any(path.stat().st_size > 4096 for path in torn.rglob("*") if path.is_file()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait(10) == -signal.SIGKILL
    process.stdout.close()
    assert [path for path in torn.rglob("*") if path.is_file()], "the torn save left something"

    assert only_checkpoint(tmp_path).name == "step-0000000001"
    engine = build(Setup(shapes=((300, 300),)))
    assert engine.load_checkpoint(tmp_path)[0].endswith("step-0000000001")
    train(engine, 2, 2)
    engine.save_checkpoint(tmp_path)  # over the torn one
    assert engine.load_checkpoint(tmp_path)[0].endswith("step-0000000002")
    assert len(data_files(torn)) == 1
    assert LocalStore(tmp_path).sweep(0) == 1
    engine.destroy()


def test_store_that_is_gone_when_files_are_taken_back_still_tells_the_cause(tmp_path, monkeypatch):
    def refuse(self, keys):
        raise StorageError("gone", where=self.uri)

    monkeypatch.setattr(Failing, "delete", refuse)
    engine = build(SETUP)
    with pytest.raises(CheckpointError, match="not saved") as caught:
        engine.save_to(Failing(tmp_path, "write"), "a", step=0, state={})
    assert "on fire" in str(caught.value)
    engine.destroy()

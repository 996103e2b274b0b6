"""Deleting on a real disk and a real S3 server: manifest first, orphans by age, and killed in the middle."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from raydz.checkpoint import committed_steps, open_checkpoint, step_folder
from raydz.checkpoint.retention import Best, Rules
from raydz.checkpoint.stock import StockTaker
from raydz.checkpoint.sweep import Sweeper
from raydz.errors import StorageError
from raydz.storage import S3Options, open_store
from raydz.storage.local import LocalStore
from tests.checkpoint.states import Setup, build, train
from tests.support.runs import REPOSITORY

STEPS = (10, 20, 30, 40)
LOSSES = dict(zip(STEPS, (2.0, 1.0, 3.0, 4.0), strict=True))
DAY_S = 86400.0


def save_run(store, losses=LOSSES) -> None:
    """Checkpoints of a real engine, with the metrics that a run saves beside them."""
    engine = build(Setup())
    train(engine, 1, 1)
    for step, loss in losses.items():
        engine.save_to(store, step_folder(step), step=step, state={"metrics": {"eval_loss": loss}})
    engine.destroy()


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("run")
    save_run(open_store(str(root)))
    return root


@pytest.fixture
def store(pristine, tmp_path) -> LocalStore:
    shutil.copytree(pristine, tmp_path / "run")
    return LocalStore(tmp_path / "run")


def age(root: Path, seconds: float) -> None:
    """Make all files below so much older."""
    for path in root.rglob("*"):
        if path.is_file():
            os.utime(path, (time.time() - seconds,) * 2)


def torn_save(store: LocalStore, step: int, attempt: str = "0123abcd", ranks: int = 2) -> Path:
    """What a save leaves that was killed before its commit."""
    for rank in range(ranks):
        store.put(f"{step_folder(step)}/{attempt}/rank-{rank:05d}-of-00002.safetensors", bytes(1000))
    return store.root / step_folder(step) / attempt


def test_surplus_goes_and_the_rest_loads(store):
    swept = Sweeper(store, Rules(last=1, best=Best("eval_loss"))).run()
    assert swept.checkpoints == [step_folder(10), step_folder(30)] and swept.faults == []
    assert committed_steps(store) == [20, 40]
    assert sorted(path.name for path in store.root.iterdir()) == [step_folder(20), step_folder(40)]
    engine = build(Setup())
    for step in (20, 40):
        engine.load_checkpoint(store.root, tag=step_folder(step))
    engine.destroy()


def test_bytes_are_those_on_the_disk(store):
    before = sum(path.stat().st_size for path in store.root.rglob("*.safetensors"))
    sweeper = Sweeper(store, Rules(last=2))
    plan = sweeper.plan()
    swept = sweeper.run(plan)
    after = sum(path.stat().st_size for path in store.root.rglob("*.safetensors"))
    assert swept.num_bytes == plan.num_bytes == before - after > 0


def test_manifest_is_deleted_before_its_data(store, monkeypatch):
    deleted = []
    usual = LocalStore.delete

    def delete(self, keys):
        keys = list(keys)
        deleted.append(keys)
        usual(self, keys)

    monkeypatch.setattr(LocalStore, "delete", delete)
    Sweeper(store, Rules(last=3)).run()
    assert deleted[0] == [f"{step_folder(10)}/manifest.json"]
    assert [key.endswith(".safetensors") for key in deleted[1]] == [True]


def test_nothing_is_deleted_without_a_rule(store):
    before = store.list()
    assert Sweeper(store, Rules()).run().is_nothing
    assert store.list() == before


def test_what_is_in_use_stays(store):
    used = [step_folder(10), step_folder(20)]
    sweeper = Sweeper(store, Rules(last=1), in_use=lambda: used)
    sweeper.run()
    assert committed_steps(store) == [10, 20, 40]
    used.clear()
    sweeper.run()
    assert committed_steps(store) == [40]


def test_a_checkpoint_taken_into_use_after_the_plan_stays(store):
    used: list[str] = []
    sweeper = Sweeper(store, Rules(last=1), in_use=lambda: used)
    plan = sweeper.plan()
    used.append(step_folder(10))
    sweeper.run(plan)
    assert committed_steps(store) == [10, 40]


@pytest.mark.parametrize("damage", ["missing file", "short file", "damaged manifest"])
def test_the_last_good_one_is_kept_behind_damaged_newer_ones(store, damage):
    (file,) = (store.root / step_folder(40)).rglob("*.safetensors")
    if damage == "missing file":
        file.unlink()
    elif damage == "short file":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        manifest = store.root / step_folder(40) / "manifest.json"
        manifest.write_bytes(manifest.read_bytes().replace(b'"step"', b'"stop"', 1))
    sweeper = Sweeper(store, Rules(last=1), sweep_after_s=1)
    age(store.root, DAY_S)
    assert [found.step for found in sweeper.plan().damaged] == [40]
    assert sweeper.plan().orphans == (), "its files may be the committed ones"
    assert sweeper.run().checkpoints == [step_folder(10), step_folder(20)]
    assert open_checkpoint(store, step_folder(30))[1].step == 30
    assert store.exists(f"{step_folder(40)}/manifest.json"), "damaged ones are for people to look at"


def test_a_folder_whose_manifest_is_of_another_step_is_left(store):
    shutil.copytree(store.root / step_folder(10), store.root / step_folder(50))
    sweeper = Sweeper(store, Rules(last=1))
    assert [found.step for found in sweeper.plan().damaged] == [50]
    sweeper.run()
    assert committed_steps(store) == [40, 50]


def test_names_that_are_no_steps_are_left(store):
    shutil.copytree(store.root / step_folder(10), store.root / "best")
    store.put("notes.txt", b"mine")
    store.put(f"{step_folder(10)}/notes.txt", b"mine")
    age(store.root, 2 * DAY_S)
    Sweeper(store, Rules(last=1), sweep_after_s=DAY_S).run()
    assert store.exists("best/manifest.json") and store.exists("notes.txt")
    assert store.get(f"{step_folder(10)}/notes.txt") == b"mine"


def test_torn_saves_are_swept_by_the_age_of_their_newest_file(store):
    torn_save(store, 50)
    young = torn_save(store, 60)
    age(store.root, 2 * DAY_S)
    os.utime(young / "rank-00001-of-00002.safetensors")  # its other rank was slow
    swept = Sweeper(store, Rules(), sweep_after_s=DAY_S).run()
    assert swept.orphans == [f"{step_folder(50)}/0123abcd"] and swept.num_bytes == 2000
    assert not (store.root / step_folder(50)).exists() and len(list(young.iterdir())) == 2
    assert committed_steps(store) == list(STEPS)


def test_a_losing_attempt_is_swept_beside_the_winner(store):
    torn_save(store, 20)
    age(store.root, 2 * DAY_S)
    Sweeper(store, Rules(), sweep_after_s=DAY_S).run()
    assert len(list((store.root / step_folder(20)).iterdir())) == 2
    engine = build(Setup())
    engine.load_checkpoint(store.root, tag=step_folder(20))
    engine.destroy()


def test_an_attempt_that_commits_while_we_look_is_spared(store):
    torn_save(store, 20)
    attempt = open_checkpoint(store, step_folder(20))[1].attempt
    manifest = store.get(f"{step_folder(20)}/manifest.json")
    store.delete([f"{step_folder(20)}/manifest.json"])
    age(store.root, 2 * DAY_S)
    sweeper = Sweeper(store, Rules(), sweep_after_s=DAY_S)
    plan = sweeper.plan()
    assert {orphan.attempt for orphan in plan.orphans} == {attempt, "0123abcd"}
    store.put(f"{step_folder(20)}/manifest.json", manifest)
    assert sweeper.run(plan).orphans == [f"{step_folder(20)}/0123abcd"]
    assert committed_steps(store) == list(STEPS)


def test_attempts_that_are_in_use_or_young_are_never_swept(store):
    torn_save(store, 50)
    assert Sweeper(store, Rules(), sweep_after_s=60).run().orphans == []
    age(store.root, 2 * DAY_S)
    assert Sweeper(store, Rules(), sweep_after_s=DAY_S, in_use=lambda: [step_folder(50)]).run().orphans == []
    assert Sweeper(store, Rules()).run().orphans == []  # no age was given


def test_leftovers_of_killed_writers_are_swept_too(store):
    (store.root / step_folder(10) / ".raydz-tmp-left").write_bytes(b"half")
    age(store.root, 2 * DAY_S)
    assert Sweeper(store, Rules(), sweep_after_s=DAY_S).run().num_leftovers == 1


def test_one_that_cannot_be_deleted_keeps_no_other(store, monkeypatch):
    usual = LocalStore.delete

    def delete(self, keys):
        keys = list(keys)
        if keys[0].startswith(step_folder(10)):
            raise StorageError("no deletes here", got="EACCES")
        usual(self, keys)

    monkeypatch.setattr(LocalStore, "delete", delete)
    swept = Sweeper(store, Rules(last=1)).run()
    assert swept.checkpoints == [step_folder(20), step_folder(30)]
    assert swept.faults == [f"{step_folder(10)}: no deletes here (EACCES)"]
    assert committed_steps(store) == [10, 40]


KILLED = """
import os, sys
from raydz.checkpoint.retention import Rules
from raydz.checkpoint.sweep import Sweeper
from raydz.storage.local import LocalStore

usual = LocalStore.delete
def delete(self, keys):
    keys = list(keys)
    if sys.argv[2] == "before":
        os.kill(os.getpid(), 9)
    usual(self, keys)
    if sys.argv[2] == "after":
        os.kill(os.getpid(), 9)
LocalStore.delete = delete
Sweeper(LocalStore(sys.argv[1]), Rules(last=1)).run()
"""


@pytest.mark.parametrize(("moment", "left"), [("before", list(STEPS)), ("after", [20, 30, 40])])
def test_killed_around_the_manifest_a_later_sweep_finishes(store, moment, left):
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(store.root), moment], cwd=REPOSITORY, capture_output=True, timeout=60
    )
    assert done.returncode == -9, done.stderr
    assert committed_steps(store) == left
    assert any(key.endswith(".safetensors") for key in store.list(step_folder(10)))
    age(store.root, 2 * DAY_S)
    Sweeper(store, Rules(last=1), sweep_after_s=DAY_S).run()
    assert store.list_folders() == [step_folder(40)]


def test_manifests_are_read_once(store, monkeypatch):
    read = []
    usual = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key, *a, **k: read.append(key) or usual(self, key, *a, **k))
    taker = StockTaker(store)
    assert [found.step for found in taker.take().committed] == list(STEPS)
    assert len(read) == 4
    save_run(store, {50: 1.0})
    read.clear()
    assert [found.step for found in taker.take().committed] == [*STEPS, 50]
    assert read == [f"{step_folder(50)}/manifest.json"]


def test_manifests_that_nothing_needs_are_not_read(store, monkeypatch):
    torn_save(store, 20)
    age(store.root, 2 * DAY_S)
    read = []
    usual = LocalStore.get
    monkeypatch.setattr(LocalStore, "get", lambda self, key, *a, **k: read.append(key) or usual(self, key, *a, **k))
    sweeper = Sweeper(store, Rules(), sweep_after_s=DAY_S, reads_all=False)
    assert sweeper.run().orphans == [f"{step_folder(20)}/0123abcd"]
    assert set(read) == {f"{step_folder(20)}/manifest.json"}
    assert committed_steps(store) == list(STEPS)
    Sweeper(store, Rules(last=1), reads_all=False).run()  # rules need them
    assert committed_steps(store) == [40]


@pytest.mark.s3
def test_the_same_in_a_bucket(s3_env):
    bucket = s3_env.bucket()
    store = open_store(f"s3://{bucket}/runs/a/checkpoints", S3Options(endpoint_url=s3_env.endpoint_url))
    save_run(store)
    store.put(f"{step_folder(50)}/0123abcd/rank-00000-of-00001.safetensors", b"torn")
    client = s3_env.client()
    upload = {"Bucket": bucket, "Key": f"runs/a/checkpoints/{step_folder(60)}/0123abcd/rank"}
    client.create_multipart_upload(**upload)
    rules = Rules(last=1, every=20)
    assert Sweeper(store, rules, sweep_after_s=3600).run().orphans == []
    assert committed_steps(store) == [20, 40]
    swept = Sweeper(store, rules, sweep_after_s=-5).run()  # clocks of both sides may differ by seconds
    assert swept.orphans == [f"{step_folder(50)}/0123abcd"] and swept.num_leftovers == 1 and swept.faults == []
    keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket)["Contents"]]
    assert len(keys) == 4 and all(step_folder(20) in key or step_folder(40) in key for key in keys)
    assert "Uploads" not in client.list_multipart_uploads(Bucket=bucket)
    client.close()

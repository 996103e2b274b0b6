"""Of two starts of one run the newer counts: an older one cannot commit, and what it still commits is passed over."""

from __future__ import annotations

import shutil
import threading

import pytest

from raydz.checkpoint import committed_steps, find_checkpoint, open_checkpoint, step_folder
from raydz.checkpoint.generations import TAG_BYTES, Fence, History, read_history, tag_of
from raydz.checkpoint.retention import Rules
from raydz.checkpoint.sweep import Sweeper
from raydz.errors import Superseded
from raydz.storage import S3Options, open_store
from tests.checkpoint.states import Setup, build, train


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.s3)])
def store(request, tmp_path):
    if request.param == "folder":
        return open_store(str(tmp_path / "run"))
    server = request.getfixturevalue("s3_env")
    return open_store(f"s3://{server.shared_bucket}/{tmp_path.name}", S3Options(endpoint_url=server.endpoint_url))


@pytest.fixture(scope="module")
def engine():
    engine = build(Setup())
    train(engine, 1, 1)
    yield engine
    engine.destroy()


def begin(store, step: int) -> Fence:
    fence = Fence.claim(store)
    fence.began(step)
    return fence


def save(engine, store, step: int, fence: Fence | None) -> None:
    engine.fence = fence
    engine.save_to(store, step_folder(step), step=step, state={})


def attempts(store, step: int) -> set[str]:
    return {key.split("/")[1] for key in store.list(step_folder(step)) if key.endswith(".safetensors")}


def test_a_start_that_was_replaced_cannot_commit_and_leaves_no_file(engine, store):
    old = begin(store, 0)
    save(engine, store, 5, old)
    new = Fence.claim(store)
    with pytest.raises(Superseded, match="newer start"):
        save(engine, store, 10, old)
    assert not attempts(store, 10) and committed_steps(store) == [5]
    new.began(5)
    save(engine, store, 10, new)
    assert committed_steps(store) == [5, 10] and open_checkpoint(store)[1].generation == new.tag


def test_the_save_behind_training_says_so_too(engine, store):
    old = begin(store, 0)
    begin(store, 0)
    engine.fence = old
    handle = engine.save_async(store, step_folder(5), step=5, state={})
    handle.wait()
    assert isinstance(handle.error, Superseded) and not handle.error.retryable
    assert committed_steps(store) == []


class Late:
    """A store whose put of a manifest is held up: a process that was stopped between its last look and the put."""

    def __init__(self, store, meanwhile) -> None:
        self._store, self._meanwhile = store, meanwhile

    def __getattr__(self, name):
        return getattr(self._store, name)

    def put(self, key, data, *, if_absent=False):
        if key.endswith("manifest.json"):
            self._meanwhile()
        return self._store.put(key, data, if_absent=if_absent)


def test_a_commit_that_slips_through_does_not_count(engine, store):
    old, newer = begin(store, 0), []
    save(engine, store, 5, old)
    with pytest.raises(Superseded):
        save(engine, Late(store, lambda: newer.append(begin(store, 5))), 10, old)
    assert store.exists(f"{step_folder(10)}/manifest.json"), "it is there"
    assert committed_steps(store) == [5] and find_checkpoint(store) == step_folder(5), "and nobody takes it"
    late = open_checkpoint(store, step_folder(10))[1]
    assert late.generation == old.tag

    sweeper = Sweeper(store, Rules(last=1))
    assert sweeper.run().checkpoints == [], "it does not push out the newest one that counts"
    [damaged] = sweeper.plan().damaged
    assert damaged.folder == step_folder(10) and "after generation 2" in str(damaged.fault)

    save(engine, store, 10, newer[0])
    assert committed_steps(store) == [5, 10] and open_checkpoint(store)[1].generation == newer[0].tag
    assert store.exists(f"{step_folder(10)}/set-aside.json"), "the late one, for people to look at"


def test_a_commit_before_the_newer_one_chose_its_start_counts(engine, store):
    """Claimed first, chosen after that: what was committed in between is part of the history."""
    old = begin(store, 0)
    with pytest.raises(Superseded):
        save(engine, Late(store, lambda: Fence.claim(store)), 10, old)
    assert committed_steps(store) == [10]
    Fence.claim(store).began(10)
    assert committed_steps(store) == [10]


def test_a_claim_that_was_overtaken_does_not_begin(store):
    first = Fence.claim(store)
    second = begin(store, 0)
    with pytest.raises(Superseded):
        first.began(0)
    second.check()


def test_racing_claims_get_numbers_of_their_own(store):
    fences: list[Fence] = []
    threads = [threading.Thread(target=lambda: fences.append(Fence.claim(store))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(fence.number for fence in fences) == [1, 2, 3, 4, 5, 6]
    [last] = [fence for fence in fences if fence.number == 6]
    last.check()
    for fence in fences:
        if fence is not last:
            with pytest.raises(Superseded):
                fence.check()


def test_a_copy_in_another_folder_counts_whatever_happened_there(engine, tmp_path):
    source, target = open_store(str(tmp_path / "source")), open_store(str(tmp_path / "target"))
    save(engine, source, 30, begin(source, 0))
    begin(target, 0)
    begin(target, 10)
    shutil.copytree(tmp_path / "source" / step_folder(30), tmp_path / "target" / step_folder(30))
    assert committed_steps(target) == [30]


def test_the_generation_is_in_a_manifests_first_bytes_and_under_its_checksum(engine, tmp_path):
    store = open_store(str(tmp_path))
    fence = begin(store, 0)
    save(engine, store, 1, fence)
    save(engine, store, 2, None)
    assert tag_of(store.get(f"{step_folder(1)}/manifest.json", 0, TAG_BYTES)) == fence.tag
    assert tag_of(store.get(f"{step_folder(2)}/manifest.json", 0, TAG_BYTES)) is None
    assert open_checkpoint(store, step_folder(1))[1].state["generation"] == fence.tag


def test_only_what_was_committed_beyond_a_later_start_is_too_late():
    history = History(4, {1: (0, "a"), 2: (10, "b"), 4: (20, "c")})
    late = {(number, step) for number, token in ((1, "a"), (2, "b"), (4, "c")) for step in (5, 10, 15, 20, 25)
            if history.superseding(f"{number}-{token}", step)}  # fmt: skip
    assert late == {(1, 15), (1, 20), (1, 25), (2, 25)}
    assert history.superseding("1-x", 25) is None and history.superseding(None, 25) is None
    assert history.floor == 10 and History(1, {1: (7, "a")}).floor is None


def test_other_files_in_the_folder_of_generations_are_passed_over(tmp_path):
    store = open_store(str(tmp_path))
    store.put("generations/notes.txt", b"")
    fence = begin(store, 3)
    assert read_history(store) == History(1, {1: (3, fence.token)})

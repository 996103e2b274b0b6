"""What only a store on a file system has to prove: killed writers, rights, full disks."""

from __future__ import annotations

import multiprocessing
import os
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raydz.errors import StorageError
from raydz.storage import AlreadyExists, ObjectChanged, open_store
from raydz.storage.local import LocalStore
from raydz.storage.store import TEMP_PREFIX

NOBODY = 65534

KILLED_WRITER = """
import sys, time
from raydz.storage import open_store
with open_store(sys.argv[1]).writer("step-1/rank0.bin") as out:
    out.write(bytes(1 << 20))
    print("written", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that another user may enter, which pytest's own folders are not."""
    with tempfile.TemporaryDirectory(prefix="raydz-test-") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_a_killed_writer_leaves_no_visible_key_and_is_swept(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with subprocess.Popen([sys.executable, "-c", KILLED_WRITER, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"written\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(tmp_path.rglob(f"{TEMP_PREFIX}*"))) == 1  # the test would be empty if it had not begun
    assert store.list() == []
    assert store.list_folders() == []
    assert not store.exists("step-1/rank0.bin")
    assert store.sweep(older_than_s=3600) == 0
    assert store.sweep(older_than_s=0) == 1
    assert list(tmp_path.iterdir()) == []


def test_sweep_spares_committed_files_of_any_age(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("old", b"x")
    os.utime(tmp_path / "old", (0, 0))
    assert store.sweep(0) == 0
    assert store.list() == ["old"]


def test_delete_prunes_empty_folders_but_not_the_root(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "root")
    store.put("a/b/c", b"x")
    store.put("a/d", b"x")
    store.delete(["a/b/c"])
    assert sorted(path.name for path in (tmp_path / "root/a").iterdir()) == ["d"]
    store.delete(["a/d"])
    assert list((tmp_path / "root").iterdir()) == []


def test_puts_survive_a_pruning_neighbour(tmp_path: Path) -> None:
    store, stop = LocalStore(tmp_path), threading.Event()

    def prune() -> None:
        while not stop.is_set():
            store.delete(["a/b/other"])

    thread = threading.Thread(target=prune)
    thread.start()
    try:
        for number in range(30):
            store.put(f"a/b/{number}", b"x")
            store.delete([f"a/b/{number}"])
    finally:
        stop.set()
        thread.join()


def test_files_get_the_mode_of_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        LocalStore(tmp_path).put("k", b"x")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "k").stat().st_mode) == 0o640


def test_the_data_are_synced_before_the_name_and_the_name_before_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of system calls is the promise; a power cut cannot be had in a test."""
    (tmp_path / "folder").mkdir()
    for if_absent, step in ((False, "replace"), (True, "link")):
        calls: list[str] = []
        with monkeypatch.context() as patch:
            fsync, commit = os.fsync, getattr(os, step)

            def spy_fsync(fd: int, calls: list[str] = calls, fsync=fsync) -> None:
                calls.append("fsync folder" if stat.S_ISDIR(os.fstat(fd).st_mode) else "fsync file")
                fsync(fd)

            def spy_commit(source: Path, target: Path, calls: list[str] = calls, commit=commit) -> None:
                calls.append("name")
                commit(source, target)

            patch.setattr(os, "fsync", spy_fsync)
            patch.setattr(os, step, spy_commit)
            LocalStore(tmp_path).put(f"folder/{step}", b"x", if_absent=if_absent)
        assert calls == ["fsync file", "name", "fsync folder"]


def test_a_full_disk_is_told_at_that_write_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("k", b"good")
    real_write, room = os.write, [1000]

    def write(fd: int, data: memoryview) -> int:
        if room[0] == 0:
            raise OSError(28, "No space left on device")
        count = real_write(fd, data[: room[0]])  # the last write before a full disk is short
        room[0] -= count
        return count

    monkeypatch.setattr(os, "write", write)
    with pytest.raises(StorageError, match="ENOSPC") as caught, store.writer("k") as out:
        out.write(bytes(2000))
    assert str(tmp_path / "k") in str(caught.value)
    assert "free some space" in str(caught.value)
    assert store.get("k") == b"good"
    assert [path.name for path in tmp_path.iterdir()] == ["k"]


def test_a_file_system_without_hard_links_is_refused_by_the_probe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr(os, "link", link)
    with pytest.raises(StorageError, match="hard links"):
        LocalStore(tmp_path).probe_writable()


def _probe_as_nobody(root: str, answers) -> None:
    if os.geteuid() == 0:
        os.setuid(NOBODY)
    try:
        LocalStore(root).probe_writable()
        answers.put("no error")
    except StorageError as error:
        answers.put(str(error))


@pytest.mark.parametrize("sub_folder", ["", "made/by/the/first/write"])
def test_a_path_without_the_right_to_write_is_named(root: Path, sub_folder: str) -> None:
    root.chmod(0o555)
    context = multiprocessing.get_context("fork")  # a fresh interpreter may be unreadable for the other user
    answers = context.Queue()
    begin = time.monotonic()
    process = context.Process(target=_probe_as_nobody, args=(str(root / sub_folder), answers))
    process.start()
    text = answers.get(timeout=10)
    process.join()
    assert time.monotonic() - begin < 10
    assert "cannot write this path" in text
    assert str(root) in text
    assert "EACCES" in text


def test_a_path_through_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x")
    with pytest.raises(StorageError, match="a component of the path is a file"):
        LocalStore(tmp_path / "file" / "store").probe_writable()


def test_an_unreadable_folder_is_an_error_not_an_empty_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    store.put("a/k", b"x")
    real_scandir = os.scandir

    def scandir(path: str) -> object:
        if str(path).endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return real_scandir(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(StorageError, match="EACCES"):
        store.list()


def test_a_replacement_of_equal_size_and_time_is_still_another_version(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("k", b"one")
    etag, times = store.head("k").etag, os.stat(tmp_path / "k")
    store.put("k", b"two")
    os.utime(tmp_path / "k", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ObjectChanged):
        store.get("k", if_match=etag)


def test_if_absent_does_not_take_the_name_of_a_folder(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put("a/k", b"x")
    with pytest.raises(AlreadyExists):
        store.put("a", b"x", if_absent=True)
    with pytest.raises(StorageError, match="EISDIR"):
        store.put("a", b"x")
    assert store.list() == ["a/k"]


@pytest.mark.parametrize("uri", ["{}", "file://{}", "file://localhost{}"])
def test_uris_of_one_folder_open_one_store(tmp_path: Path, uri: str) -> None:
    store = open_store(uri.format(tmp_path))
    store.put("k", b"x")
    assert (tmp_path / "k").read_bytes() == b"x"
    assert store.uri == str(tmp_path)


def test_a_relative_path_keeps_its_meaning_when_the_process_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store("runs/a")
    monkeypatch.chdir("/")
    store.put("k", b"x")
    assert (tmp_path / "runs/a/k").read_bytes() == b"x"

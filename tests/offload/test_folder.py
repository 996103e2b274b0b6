"""Folders on a shared disk: two owners never meet, and what an owner leaves behind goes, however it ended."""

from __future__ import annotations

import multiprocessing
import multiprocessing.process
import os
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from raydz.errors import OffloadError
from raydz.offload.folder import SwapFolder
from tests.support.disks import full_disk, needs_mounts

__all__ = ["needs_mounts"]
# Python warns of forks in processes with threads; these children only sleep.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
FORK = multiprocessing.get_context("fork")
Owner = tuple[multiprocessing.process.BaseProcess, Path]


def _own(root: str, swap_bytes: int, pipe: Connection) -> None:
    folder = SwapFolder(root, "run", 0)
    (folder.path / "left").write_bytes(bytes(1000))
    file = folder.create("swap")
    file.allocate(swap_bytes)
    pipe.send(folder.path)
    time.sleep(600)


def start_owner(root: Path, swap_bytes: int = 0) -> Owner:
    """A process with a folder, and the folder."""
    here, there = FORK.Pipe()
    process = FORK.Process(target=_own, args=(str(root), swap_bytes, there))
    process.start()
    assert here.poll(60)
    return process, here.recv()


def kill(process: multiprocessing.process.BaseProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def folders(root: Path) -> set[Path]:
    return set((root / "raydz").glob("*/rank*"))


def test_two_owners_of_one_name_never_meet(tmp_path):
    first, second = SwapFolder(str(tmp_path), "run"), SwapFolder(str(tmp_path), "run")
    assert first.path != second.path
    assert folders(tmp_path) == {first.path, second.path}
    first.close()
    assert folders(tmp_path) == {second.path}
    second.close()
    assert os.listdir(tmp_path / "raydz") == [".lock"]


def test_a_killed_owners_folder_is_swept_and_a_living_ones_is_not(tmp_path):
    killed, left = start_owner(tmp_path)
    alive, kept = start_owner(tmp_path)
    kill(killed)
    assert (left / "left").exists()
    mine = SwapFolder(str(tmp_path), "another")
    assert folders(tmp_path) == {kept, mine.path}
    assert (kept / "left").exists()
    kill(alive)
    mine.close()


@pytest.mark.slow
def test_an_owner_that_ends_leaves_nothing(tmp_path):
    code = (
        "import sys; from raydz.offload.folder import SwapFolder; folder = SwapFolder(sys.argv[1]); print(folder.path)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert str(tmp_path) in done.stdout
    assert folders(tmp_path) == set()


def test_space_of_a_killed_owners_file_is_free_at_once(tmp_path, needs_mounts):
    with full_disk(tmp_path / "disk", 64 << 20) as disk:

        def free() -> int:
            return os.statvfs(disk).f_bfree * os.statvfs(disk).f_frsize

        before = free()
        process, _ = start_owner(disk, 32 << 20)
        assert before - free() >= 32 << 20
        kill(process)
        assert before - free() < 1 << 20


def _linger(pipe: Connection) -> None:
    pipe.send("begun")
    time.sleep(600)


def _leave(folder: SwapFolder) -> None:
    folder.close()


def test_a_forked_child_neither_removes_nor_keeps_the_folder(tmp_path):
    folder = SwapFolder(str(tmp_path))
    child = FORK.Process(target=_leave, args=(folder,))
    child.start()
    child.join()
    assert child.exitcode == 0
    assert folders(tmp_path) == {folder.path}
    here, there = FORK.Pipe()
    lingering = FORK.Process(target=_linger, args=(there,))
    lingering.start()
    assert here.poll(60)
    os.close(folder._lock)  # as the kernel does when the owner dies
    other = SwapFolder(str(tmp_path))
    assert folders(tmp_path) == {other.path}
    lingering.kill()
    lingering.join()
    folder._remove.detach()
    other.close()


def test_names_of_runs_become_single_folder_names(tmp_path):
    folder = SwapFolder(str(tmp_path), "../a b/ü", 3)
    assert folder.path.parent.parent == tmp_path / "raydz"
    assert folder.path.name.startswith("rank3-")
    folder.close()


@pytest.mark.parametrize("root", ["/proc/none", "/dev/null/x"])
def test_a_path_that_cannot_hold_a_folder_is_named(root):
    with pytest.raises(OffloadError, match=rf"{root}(.|\n)*errno"):
        SwapFolder(root)

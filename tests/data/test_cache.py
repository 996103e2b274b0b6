"""Built once, complete or not there: also when builders race, fail or are killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from raydz.data.cache import build_once
from raydz.errors import StorageError

BUILDER = """
import os, sys, time
from pathlib import Path
from raydz.data.cache import build_once
def build(folder):
    (folder / "half").write_text("half")
    print("half", flush=True)
    time.sleep(float(sys.argv[2]))
    (folder / "whole").write_text(str(os.getpid()))
build_once(Path(sys.argv[1]), "key", build)
"""


def start(folder, seconds):
    command = [sys.executable, "-c", BUILDER, str(folder), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def visible(folder):
    return [path.name for path in folder.iterdir() if not path.name.endswith(".lock")]


def test_second_call_does_not_build(tmp_path):
    calls = []

    def build(folder):
        calls.append(folder)
        (folder / "file").write_text("content")

    first = build_once(tmp_path / "new" / "cache", "key", build)
    assert build_once(tmp_path / "new" / "cache", "key", build) == first
    assert len(calls) == 1 and (first / "file").read_text() == "content"


def test_racing_processes_build_once_and_all_wait_for_it(tmp_path):
    processes = [start(tmp_path, 0.3) for _ in range(4)]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * 4
    assert sum("half" in output for output in outputs) == 1
    assert visible(tmp_path) == ["key"]


def test_killed_builder_leaves_nothing_that_looks_finished_and_the_next_cleans_up(tmp_path):
    process = start(tmp_path, 60)
    assert process.stdout.readline() == "half\n"
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "key").exists() and len(visible(tmp_path)) == 1
    began = time.monotonic()
    final = build_once(tmp_path, "key", lambda folder: (folder / "whole").write_text("second"))
    assert time.monotonic() - began < 10
    assert visible(tmp_path) == ["key"] and os.listdir(final) == ["whole"]


def test_failing_builder_leaves_nothing_and_its_error_comes_through(tmp_path):
    def build(folder):
        (folder / "half").write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build_once(tmp_path, "key", build)
    assert visible(tmp_path) == []


def test_builder_of_another_host_that_wins_is_used(tmp_path):
    def build(folder):
        (tmp_path / "key").mkdir()
        (tmp_path / "key" / "whole").write_text("theirs")
        (folder / "whole").write_text("ours")

    assert (build_once(tmp_path, "key", build) / "whole").read_text() == "theirs"
    assert visible(tmp_path) == ["key"]


def test_a_place_that_cannot_be_written_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(StorageError, match=r"data\.cache_dir"):
        build_once(tmp_path / "file" / "cache", "key", lambda folder: None)

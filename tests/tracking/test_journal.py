from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from raydz.tracking import journal as journal_module
from raydz.tracking.journal import Journal, JournalTail, read


def steps_of(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def write_steps(path, steps, resume_step=0, attempt=0, loss=1.0) -> Journal:
    journal = Journal.open(path, resume_step, attempt)
    for step in steps:
        journal.append(step, {"loss": loss})
    journal.close()
    return journal


def test_a_line_holds_step_time_attempt_and_metrics(tmp_path):
    path = tmp_path / "run" / "journal.jsonl"
    before = time.time()
    journal = Journal.open(path, 0, attempt=2)
    journal.append(1, {"loss": 2.5, "skipped_steps": 0, "grad_norm": float("inf")})
    record = json.loads(path.read_text())  # before close: the line is there at once
    journal.close()
    assert before - 0.01 <= record.pop("time") <= time.time() + 0.01
    assert record == {"step": 1, "loss": 2.5, "skipped_steps": 0, "grad_norm": "inf", "attempt": 2}
    assert read(path)[0]["grad_norm"] == float("inf")


def test_a_resume_sets_later_steps_aside_and_each_step_is_there_once(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_steps(path, range(1, 11), loss=1.0)
    write_steps(path, range(7, 13), resume_step=6, attempt=1, loss=2.0)
    assert steps_of(path) == list(range(1, 13))
    assert [record["loss"] for record in read(path)] == [1.0] * 6 + [2.0] * 6
    assert steps_of(tmp_path / "journal.discarded-1.jsonl") == [7, 8, 9, 10]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["journal.discarded-1.jsonl", "journal.jsonl"]


def test_an_attempt_number_that_comes_again_adds_to_what_it_set_aside(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_steps(path, range(1, 5))
    write_steps(path, range(3, 6), resume_step=2, attempt=1)
    write_steps(path, [], resume_step=4, attempt=1)
    assert steps_of(tmp_path / "journal.discarded-1.jsonl") == [3, 4, 5]
    assert steps_of(path) == [1, 2, 3, 4]


def test_a_crash_between_copy_and_cut_loses_no_line(tmp_path, monkeypatch):
    path = tmp_path / "journal.jsonl"
    write_steps(path, range(1, 6))
    replace = os.replace

    def crash_on_journal(source, target):
        if str(target) == str(path):
            raise KeyboardInterrupt
        replace(source, target)

    monkeypatch.setattr(journal_module.os, "replace", crash_on_journal)
    with pytest.raises(KeyboardInterrupt):
        Journal.open(path, 3, 1)
    assert steps_of(path) == [1, 2, 3, 4, 5]
    monkeypatch.undo()
    Journal.open(path, 3, 1).close()
    assert steps_of(path) == [1, 2, 3]
    assert steps_of(tmp_path / "journal.discarded-1.jsonl") == [4, 5]


def test_damaged_and_doubled_lines_are_set_aside(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_steps(path, [1, 2, 3])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + b"\x00\xff garbage\n" + lines[1] + lines[0] + lines[2] + lines[2][:9])
    Journal.open(path, 3, 4).close()
    assert steps_of(path) == [1, 2, 3]
    assert (tmp_path / "journal.discarded-4.jsonl").read_bytes() == b"\x00\xff garbage\n" + lines[0]


def test_a_step_is_not_written_twice(tmp_path):
    journal = write_steps(tmp_path / "journal.jsonl", [1, 2])
    with pytest.raises(ValueError, match="step 2 after step 2"):
        journal.append(2, {"loss": 1.0})
    fresh = Journal.open(tmp_path / "other" / "journal.jsonl", 10, 1)
    with pytest.raises(ValueError, match="step 10"):
        fresh.append(10, {"loss": 1.0})
    fresh.close()


def test_a_killed_writer_leaves_every_step_it_reported(tmp_path):
    path = tmp_path / "journal.jsonl"
    code = (
        "import sys, itertools; from raydz.tracking.journal import Journal\n"
        "j = Journal.open(sys.argv[1], 0, 0)\n"
        "for n in itertools.count(1): j.append(n, {'loss': 1.0}); print(n, flush=True)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    for _ in range(200):
        reported = int(writer.stdout.readline())
    writer.send_signal(signal.SIGKILL)
    reported = max([reported, *map(int, writer.stdout.read().split("\n")[:-1])])
    writer.stdout.close()
    writer.wait()
    Journal.open(path, 10**9, 1).close()
    steps = steps_of(path)
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) >= reported


def test_the_tail_gives_complete_lines_only_and_again_until_it_is_moved(tmp_path):
    path = tmp_path / "journal.jsonl"
    write_steps(path, [1, 2, 3])
    whole = path.read_bytes()
    path.write_bytes(whole[:-5])
    tail = JournalTail(path)
    points, offset = tail.read(10, after_step=-1)
    assert [p.step for p in points] == [1, 2]
    assert tail.read(1, after_step=-1)[0][0].step == 1
    tail.offset = offset
    assert tail.read(10, after_step=-1)[0] == []
    path.write_bytes(whole)
    assert [p.step for p in tail.read(10, after_step=-1)[0]] == [3]
    assert tail.count(after_step=-1) == 1
    assert tail.count(after_step=3) == 0

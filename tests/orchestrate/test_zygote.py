"""A rank's processes without Ray: forked when asked, ended with whatever they started, gone with their supervisor."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
from ray import cloudpickle

from raydz.config import load, resolve_paths
from raydz.errors import PlacementError
from raydz.orchestrate.place import Place, Seat
from raydz.orchestrate.rounds import Order
from raydz.orchestrate.worker import WorkerTask
from raydz.orchestrate.zygote import Zygote
from raydz.storage.memory_slot import MemorySlot, new_memory
from tests.support.fit_driver import slow_loss
from tests.support.runs import REPOSITORY, assert_gone, losses, read_lines, small_config

SEAT = Seat(Place(0, 1, 0, 1), "n" * 56, "127.0.0.1")


def packed(root: Path, name: str, **sections: Any) -> bytes:
    train = {"steps": 8, "eval_every": 0, **sections.pop("train", {})}
    config = resolve_paths(load(small_config(root, name, train=train, scaling={"num_workers": 1}, **sections)))
    return cloudpickle.dumps(WorkerTask(config, None, slow_loss, None))


def hear(child: Connection, until: str, limit_s: float = 120) -> list[tuple[str, tuple]]:
    """What a child says, up to the first message of that name."""
    heard: list[tuple[str, tuple]] = []
    deadline = time.monotonic() + limit_s
    while not heard or heard[-1][0] != until:
        assert child.poll(deadline - time.monotonic()), f"no {until}: {heard[-3:]}"
        heard.append(child.recv())
        assert heard[-1][0] != "report" or until == "report", heard[-1]
    return heard


def hear_step(child: Connection, step: int) -> None:
    while hear(child, "post_step")[-1][1] != (step,):
        pass


def end_well(zygote: Zygote, child: Connection) -> int | None:
    child.send(("leave", None))
    return zygote.hear()


@pytest.mark.slow
def test_a_killed_child_is_followed_by_one_that_goes_on_from_memory(tmp_path: Path) -> None:
    """One rank, three processes; the losses are those of a run that nothing happened to."""
    fds = tuple(new_memory("test") for _ in range(2))
    seat = Seat(SEAT.place, SEAT.node_id, SEAT.host, fds)
    sections: dict[str, Any] = {"failure": {"memory_snapshot_every": 2}, "checkpoint": {"every": 0}}
    with Zygote(packed(tmp_path, "killed", **sections), keep=fds) as zygote:
        first = zygote.fork()
        pid = zygote.pid
        first.send((seat, Order()))
        zygote.load(*hear(first, "modules")[-1][1])
        hear_step(first, 5)
        os.kill(pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(zygote.hear()) == -signal.SIGKILL and zygote.pid is None
        assert {MemorySlot(fd).record()["step"] for fd in fds} == {2, 4}
        told = {"failures": ({"kind": "killed", "cause": "x", "seen_at": 1.0, "in_place": True},), "last_step": 5}
        assert select.select([zygote._successor], [], [], 120)[0], "the successor is not ready"
        second = zygote.fork()
        assert parent_of(zygote.pid) != zygote._process.pid, (
            "the successor forks, and has imported what the first one had"
        )
        second.send((seat, Order(1, 1, interruption={**told, "detect_s": 0.1, "seen_at": time.time()})))
        hear(second, "done")
        assert end_well(zygote, second) == 0
    assert [
        event["step"] for event in read_lines(tmp_path / "killed" / "events.jsonl") if event["event"] == "start"
    ] == [0, 4]
    for fd in fds:
        os.close(fd)
    with Zygote(packed(tmp_path, "straight", checkpoint={"every": 0})) as zygote:
        child = zygote.fork()
        child.send((SEAT, Order()))
        heard = hear(child, "done")
        assert end_well(zygote, child) == 0
    assert losses(tmp_path, "killed") == losses(tmp_path, "straight") and len(losses(tmp_path, "straight")) == 8
    assert dict(heard)["post_result"][0]["status"] == "finished"


def test_a_supervisor_imports_no_torch() -> None:
    code = "import sys, raydz.orchestrate.supervisor, raydz.orchestrate.board; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0


def test_a_supervisor_that_goes_without_reading_the_last_word_is_no_error() -> None:
    code = """
import socket
from raydz.orchestrate.zygote import _Nursery
theirs, ours = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
nursery = _Nursery(ours)
ours.send(b"unread")
theirs.close()
assert nursery.run() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=REPOSITORY)


def test_imports_hold_up_neither_the_news_of_a_childs_end_nor_the_next_one(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "takes_long.py").write_text("import time\ntime.sleep(600)")
    monkeypatch.syspath_prepend(str(tmp_path))
    with Zygote(packed(tmp_path, "long")) as zygote:
        zygote.fork()
        zygote.load(["takes_long"])
        began = time.monotonic()
        os.kill(zygote.pid, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(zygote.hear()) == -signal.SIGKILL
        zygote.fork()
        assert parent_of(zygote.pid) == zygote._process.pid and time.monotonic() - began < 60


def test_a_successor_that_is_not_fit_to_fork_is_not_used(tmp_path: Path, monkeypatch) -> None:
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()"
    (tmp_path / "starts_a_thread.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    with Zygote(packed(tmp_path, "thread")) as zygote:
        zygote.fork()
        zygote.load(["starts_a_thread"])
        assert select.select([zygote._successor], [], [], 120)[0], "it has not ended"
        zygote.end_child()
        zygote.fork()
        assert parent_of(zygote.pid) == zygote._process.pid


def parent_of(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def leaving_something(model, batch):
    """A loss that starts a process, as a data loader would."""
    subprocess.Popen(["sleep", "600"])
    return slow_loss(model, batch)


@pytest.mark.slow
def test_what_a_child_started_ends_with_it(tmp_path: Path) -> None:
    task: WorkerTask = cloudpickle.loads(packed(tmp_path, "leaves"))
    with Zygote(cloudpickle.dumps(WorkerTask(task.config, None, leaving_something, None))) as zygote:
        child = zygote.fork()
        child.send((SEAT, Order()))
        hear_step(child, 2)
        pid = zygote.pid
        group = [int(stat.parent.name) for stat in Path("/proc").glob("[0-9]*/stat") if group_of(stat) == pid]
        assert len(group) > 2
        zygote.end_child()
        assert_gone(group)


def group_of(stat: Path) -> int | None:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2])
    except OSError:
        return None


SUPERVISOR = """
import sys, time
from pathlib import Path
from raydz.orchestrate.zygote import Zygote
from raydz.orchestrate.rounds import Order
from tests.orchestrate.test_zygote import SEAT, hear_step
zygote = Zygote(Path(sys.argv[1]).read_bytes())
child = zygote.fork()
child.send((SEAT, Order()))
hear_step(child, 2)
print(zygote._process.pid, zygote.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.slow
def test_all_of_it_is_gone_when_its_supervisor_is_killed(tmp_path: Path) -> None:
    (tmp_path / "task").write_bytes(packed(tmp_path, "orphan", train={"steps": 1000}))
    process = subprocess.Popen(
        [sys.executable, "-c", SUPERVISOR, str(tmp_path / "task")], stdout=subprocess.PIPE, text=True, cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )  # fmt: skip
    with process:
        pids = [int(word) for word in process.stdout.readline().split()]
        assert len(pids) == 2
        process.kill()
    assert_gone(pids)


@pytest.mark.slow
def test_a_task_that_cannot_be_unpacked_is_told(tmp_path: Path) -> None:
    with Zygote(b"no pickle") as zygote, pytest.raises(PlacementError, match="the process that starts ranks has ended"):
        zygote.fork()

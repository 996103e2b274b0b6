"""A rank's process ends and its worker stays: all ranks start anew in place, from memory, to the same losses."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.ray_nodes import ray_nodes
from tests.support.runs import (
    assert_gone,
    losses,
    read_lines,
    small_config,
    start_driver,
    wait_for_step,
    worker_pids,
)

pytestmark = pytest.mark.ray
LIMIT_S = 300.0


def events(root: Path, name: str, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_lines(root / name / "events.jsonl") if event["event"] == kind]


def log_of(root: Path) -> str:
    return (root / "driver" / "driver.log").read_text()


def processes() -> dict[int, int]:
    """Every living process, and its parent."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] != "Z":
            found[int(stat.parent.name)] = int(fields[1])
    return found


def worker_of(pid: int) -> int:
    """The Ray worker that a rank's process belongs to, through its zygotes."""
    parents = processes()
    while not Path(f"/proc/{pid}/cmdline").read_text().startswith("ray::"):
        pid = parents[pid]
    return pid


def descendants(pid: int) -> set[int]:
    """Whatever a worker has started: zygotes, and the rank."""
    parents, found = processes(), {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def rank_processes(worker: int) -> set[int]:
    """Those of them that lead a session: the ranks."""
    found = set()
    for pid in descendants(worker):
        try:
            found |= {pid} if os.getsid(pid) == pid else set()
        except ProcessLookupError:
            continue
    return found


def memory_files(pids: list[int]) -> list[str]:
    """Anonymous memory for snapshots that these processes hold."""
    links = [link for pid in pids if Path(f"/proc/{pid}").exists() for link in Path(f"/proc/{pid}/fd").iterdir()]
    return [found for link in links if "raydz-" in (found := os.readlink(link))]


def start(root: Path, name: str, cluster, loss: str = "slow_loss", **sections: Any):
    config = small_config(root, name, **sections)
    return start_driver({"config": config, "loss": loss}, root / "driver", cluster.env)


def test_a_killed_rank_is_replaced_while_its_worker_stays(ray_cluster, straight, tmp_path: Path) -> None:
    """Both ranks' workers stay; the step is one that only memory has; nothing is left at the end."""
    shared_before = set(os.listdir("/dev/shm"))
    process = start(tmp_path, "inplace", ray_cluster, failure={"memory_snapshot_every": 4}, checkpoint={"every": 15})
    wait_for_step(tmp_path, "inplace", 14, process, LIMIT_S)
    ranks = worker_pids(tmp_path, "inplace")
    workers = [worker_of(pid) for pid in ranks]
    started = set().union(*(descendants(worker) for worker in workers))
    assert memory_files(workers), "the workers own the snapshots"
    os.kill(ranks[1], signal.SIGKILL)
    while len(events(tmp_path, "inplace", "ranks")) < 2:
        assert process.poll() is None, log_of(tmp_path)[-3000:]
        time.sleep(0.05)
    again = worker_pids(tmp_path, "inplace")
    assert [worker_of(pid) for pid in again] == workers and not set(again) & set(ranks)
    started |= set().union(*(descendants(worker) for worker in workers))
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]

    assert losses(tmp_path, "inplace") == straight
    [first, second] = events(tmp_path, "inplace", "start")
    assert (first["step"], second["step"]) == (0, 12), "the newest snapshot of all ranks; there is no checkpoint"
    [failure] = events(tmp_path, "inplace", "failure")
    assert (failure["kind"], failure["decision"], failure["in_place"]) == ("killed", "restart", True)
    [recovered] = events(tmp_path, "inplace", "recovered")
    assert (recovered["restarts"], recovered["from_step"], recovered["in_place"]) == (1, 12, True)
    assert recovered["lost_steps"] == failure["failed_step"] - 1 - 12
    assert log_of(tmp_path).count("Started training worker group") == 1
    assert set(ranks) | set(again) < started
    assert_gone(sorted(started))
    assert not [name for name in set(os.listdir("/dev/shm")) - shared_before if "raydz" in name]
    print("recovery_s", recovered["recovery_s"])


@pytest.mark.slow
def test_rank_0_too_with_whatever_it_holds_for_the_others(ray_cluster, straight, tmp_path: Path) -> None:
    process = start(tmp_path, "first", ray_cluster, failure={"memory_snapshot_every": 4})
    wait_for_step(tmp_path, "first", 14, process, LIMIT_S)
    os.kill(worker_pids(tmp_path, "first")[0], signal.SIGKILL)
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "first") == straight
    assert len(events(tmp_path, "first", "start")) == 2 and "Started training worker group" in log_of(tmp_path)


@pytest.mark.slow
def test_an_exception_on_one_rank_is_mended_in_place_within_the_same_policies(ray_cluster, tmp_path: Path) -> None:
    failure = {"max_failures": 9, "max_at_same_step": 2, "on_poison": "skip", "memory_snapshot_every": 1}
    process = start(tmp_path, "poison", ray_cluster, "poisoned_loss", failure=failure, train={"steps": 10})
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert sorted(losses(tmp_path, "poison")) == [1, 2, 3, 4, 5, 6, 8, 9, 10]
    told = events(tmp_path, "poison", "failure")
    assert [(event["kind"], event["failed_step"], event["in_place"]) for event in told] == [("exception", 7, True)] * 2
    assert [event["step"] for event in events(tmp_path, "poison", "start")] == [0, 6, 6]
    assert [event["step"] for event in events(tmp_path, "poison", "step_left_out")] == [7]
    assert log_of(tmp_path).count("Started training worker group") == 1


@pytest.mark.slow
def test_a_rank_killed_while_it_recovers_is_another_round(ray_cluster, straight, tmp_path: Path) -> None:
    process = start(tmp_path, "twice", ray_cluster, failure={"memory_snapshot_every": 4})
    wait_for_step(tmp_path, "twice", 14, process, LIMIT_S)
    victim = worker_pids(tmp_path, "twice")[1]
    worker = worker_of(victim)
    os.kill(victim, signal.SIGKILL)
    while not (found := rank_processes(worker) - {victim}):
        assert process.poll() is None
        time.sleep(0.002)
    os.kill(found.pop(), signal.SIGKILL)
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "twice") == straight
    assert [event["in_place"] for event in events(tmp_path, "twice", "failure")] == [True, True]
    [recovered] = events(tmp_path, "twice", "recovered")
    assert (recovered["failures"], recovered["restarts"]) == (2, 2)
    assert log_of(tmp_path).count("Started training worker group") == 1


@pytest.mark.slow
def test_a_lost_worker_is_a_new_group_that_goes_on_from_the_memory_of_its_node(
    ray_cluster, straight, tmp_path: Path
) -> None:
    process = start(tmp_path, "worker", ray_cluster, failure={"memory_snapshot_every": 4}, checkpoint={"every": 0})
    wait_for_step(tmp_path, "worker", 14, process, LIMIT_S)
    ranks = worker_pids(tmp_path, "worker")
    worker = worker_of(ranks[1])
    os.kill(worker, signal.SIGKILL)
    assert_gone([ranks[1]])  # with its worker
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "worker") == straight
    assert [event["step"] for event in events(tmp_path, "worker", "start")] == [0, 12]
    assert log_of(tmp_path).count("Started training worker group") == 2


@pytest.mark.slow
def test_a_lost_nodes_ranks_go_on_from_their_copies_in_another_nodes_memory(straight, tmp_path: Path) -> None:
    with ray_nodes(2) as nodes:
        failure = {"memory_snapshot_every": 4}
        process = start(tmp_path, "copies", nodes.cluster, failure=failure, checkpoint={"every": 0})
        wait_for_step(tmp_path, "copies", 14, process, LIMIT_S)
        nodes.lose()
        nodes.add()
        assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "copies") == straight
    assert [event["step"] for event in events(tmp_path, "copies", "start")] == [0, 12]
    assert "comes from a vault" in log_of(tmp_path)


@pytest.mark.slow
def test_with_in_place_off_a_killed_rank_is_a_new_group(ray_cluster, straight, tmp_path: Path) -> None:
    process = start(tmp_path, "group", ray_cluster, failure={"in_place": False})
    wait_for_step(tmp_path, "group", 14, process, LIMIT_S)
    os.kill(worker_pids(tmp_path, "group")[1], signal.SIGKILL)
    assert process.wait(timeout=LIMIT_S) == 0, log_of(tmp_path)[-5000:]
    assert losses(tmp_path, "group") == straight
    assert log_of(tmp_path).count("Started training worker group") == 2
    assert json.dumps(events(tmp_path, "group", "recovered")).count('"in_place": false') == 1

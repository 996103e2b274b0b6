"""Real Ray nodes that go and come while a run trains: it goes on with fewer workers, and with more again."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.ray_nodes import ray_nodes
from tests.support.runs import (
    losses,
    read_lines,
    small_config,
    start_driver,
    wait_for_checkpoint,
    wait_for_step,
)
from tests.train.runs import run

pytestmark = pytest.mark.ray

ROWS = 9
"""Of a step: two workers cannot share them evenly."""
SCALING = {"num_workers": [1, 2], "shrink_after_s": 2.0, "grow_check_s": 0.5, "grow_after_s": 1.0}
LIMIT_S = 500
HOLDER = """
import sys, ray
from ray.util.placement_group import placement_group
ray.init(logging_level="error")
assert placement_group([{"CPU": float(sys.argv[1])}]).wait(60)
print("held", flush=True)
sys.stdin.read()
"""


def elastic_config(root: Path, name: str, steps: int, scaling: dict | None = None) -> dict:
    return small_config(
        root, name, train={"steps": steps, "eval_every": 0}, train_batch_size=ROWS,
        tracking={"mlflow": True, "mlflow_uri": f"sqlite:///{root}/mlflow.db"}, scaling=SCALING | (scaling or {}),
        parallel={"divergence_timeout_s": 120.0},  # rank 0 makes the tables of MLflow while the others wait
    )  # fmt: skip


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    """The run on one rank that nothing happens to, with the batch cut evenly: no code of elastic runs is in it."""
    root = tmp_path_factory.mktemp("alone")
    sizes = {"train_batch_size": ROWS, "train_micro_batch_size_per_gpu": 3, "scaling": {"num_workers": 1}}
    config = small_config(root, "alone", train={"steps": 40, "eval_every": 0}, **sizes)
    assert run(config).status == "finished"
    return root


@contextmanager
def held(cpus: float, env: dict[str, str]) -> Iterator[Callable[[], None]]:
    """Something else on the cluster that takes so many CPUs, until the function that this gives is called."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(cpus)], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdin is not None and process.stdout is not None
    with process, process.stdin as until:
        assert process.stdout.readline() == "held\n"
        yield until.close


def wait_until(condition: Callable[[], object], what: str, process: subprocess.Popen) -> None:
    """While the driver runs."""
    started = time.monotonic()
    while not condition():
        assert time.monotonic() - started < LIMIT_S, f"{what}: not in {LIMIT_S} s"
        assert process.poll() is None, "the driver ended early"
        time.sleep(0.3)
    print(f"{what}: {time.monotonic() - started:.1f} s")


def sizes_of(root: Path, name: str) -> list[int]:
    """Workers of each step, in order, each number once in a row."""
    found: list[int] = []
    for line in read_lines(root / name / "journal.jsonl"):
        if not found or found[-1] != int(line["world_size"]):
            found.append(int(line["world_size"]))
    return found


def events_of(root: Path, name: str, kind: str) -> list[dict]:
    return [event for event in read_lines(root / name / "events.jsonl") if event["event"] == kind]


def failures_of(root: Path, name: str) -> list[dict]:
    """Failures but those of a busy machine: a group that took longer to be placed than its room was there.

    A lost node is seen as such or, before Ray knows it, as processes that are gone.
    """
    found = [event for event in events_of(root, name, "failure") if event["kind"] != "no room"]
    assert {event["kind"] for event in found} <= {"node lost", "killed"}
    return found


def assert_equals_alone(root: Path, name: str, alone: Path, steps: int) -> None:
    """Each step is there once; the first ones have the same rows and, but for the order of sums, the same loss."""
    want, got = losses(alone, "alone"), losses(root, name)
    assert list(got) == list(range(1, len(got) + 1))
    assert [got[step] for step in range(1, steps + 1)] == pytest.approx([*want.values()][:steps], rel=1e-6)
    lines = zip(read_lines(root / name / "journal.jsonl"), read_lines(alone / "alone" / "journal.jsonl"), strict=False)
    assert all(own["tokens_seen"] == other["tokens_seen"] and own["lr"] == other["lr"] for own, other in lines)


def assert_one_mlflow_run(root: Path, paused: list[str], steps: int) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{root}/mlflow.db")
    [found] = client.search_runs([client.get_experiment_by_name("raydz").experiment_id])
    assert found.info.status == "FINISHED"
    tags = {name: value for name, value in found.data.tags.items() if value in ("PAUSED", "KILLED")}
    assert [name for name, value in sorted(tags.items()) if value == "PAUSED"] == paused
    assert not [name for name in tags if tags[name] == "KILLED" and name in paused]
    for name in ("loss", "world_size"):
        taken = [point.step for point in client.get_metric_history(found.info.run_id, name) if point.step]
        assert sorted(taken) == list(range(1, steps + 1))


@pytest.mark.slow
def test_a_run_grows_when_there_is_room(ray_cluster, alone: Path, tmp_path: Path) -> None:
    config = elastic_config(tmp_path, "grows", 12, {"cpus_per_worker": 2})
    with held(2, ray_cluster.env) as release:
        process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
        wait_for_step(tmp_path, "grows", 1, process, LIMIT_S)
        release()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "driver" / "driver.log").read_text()[-5000:]

    assert sizes_of(tmp_path, "grows") == [1, 2]
    assert_equals_alone(tmp_path, "grows", alone, 12)
    [resized] = events_of(tmp_path, "grows", "resized")
    assert (resized["from"], resized["to"]) == (1, 2) and resized["why"].startswith("resize: room for 2 workers")
    assert resized["from_step"] == resized["step"] - 1, "it saved where it stopped, so that no step is lost"
    last = read_lines(tmp_path / "grows" / "journal.jsonl")[-1]
    assert (last["restarts"], last["lost_steps"]) == (0, 0)
    assert last["recovery_s"] == pytest.approx(resized["recovery_s"]["total"], abs=0.01)
    assert events_of(tmp_path, "grows", "failure") == events_of(tmp_path, "grows", "recovered") == []
    assert_one_mlflow_run(tmp_path, ["raydz.attempt.0.status"], 12)
    print("resized", resized["recovery_s"])


@pytest.mark.slow
def test_a_run_shrinks_when_a_node_is_lost_and_grows_when_one_comes(alone: Path, tmp_path: Path) -> None:
    with ray_nodes(2) as nodes:
        config = elastic_config(tmp_path, "moves", 80)  # on a busy machine a node takes many steps to come
        process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", nodes.cluster.env)
        wait_for_step(tmp_path, "moves", 12, process, LIMIT_S)
        wait_for_checkpoint(tmp_path, "moves", 10, process)
        nodes.lose()
        wait_until(lambda: events_of(tmp_path, "moves", "resized"), "with one worker", process)
        nodes.add()
        assert process.wait(LIMIT_S) == 0, (tmp_path / "driver" / "driver.log").read_text()[-8000:]

    assert sizes_of(tmp_path, "moves") == [2, 1, 2]
    assert_equals_alone(tmp_path, "moves", alone, 40)
    shrunk, grown = events_of(tmp_path, "moves", "resized")
    assert (shrunk["from"], shrunk["to"], grown["from"], grown["to"]) == (2, 1, 1, 2)
    [failure] = failures_of(tmp_path, "moves")
    assert shrunk["from_step"] in (10, 15) and shrunk["why"] == f"{failure['kind']}: {failure['cause']}"
    assert grown["from_step"] == grown["step"] - 1
    assert failure["reason"].startswith("failure 1 of at most 3")
    assert grown["restarts"] == 1, "a planned resize is not a failure"
    assert_one_mlflow_run(tmp_path, ["raydz.attempt.1.status"], 80)
    result = json.loads((tmp_path / "driver" / "result.json").read_text())
    assert (result["status"], result["step"]) == ("finished", 80)
    print("shrunk", shrunk["recovery_s"], "grown", grown["recovery_s"])

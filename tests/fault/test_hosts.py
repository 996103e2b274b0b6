"""Every kind of failure on a cluster of four hosts, each in a network namespace: the run goes on as if there were none.

Two workers on hosts with one CPU each, and a third host in reserve: after a lost host the world size is the same, and
so is every loss, bit for bit.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from raydz.checkpoint import committed_steps, open_checkpoint, step_folder
from raydz.storage import S3Options, open_store
from tests.fault.host_runs import NAME, STEPS, HostRun
from tests.support.hosts import Hosts
from tests.support.runs import assert_gone, losses, read_lines, run_torchrun, small_config, worker_pids
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer, set_aws_environment

pytestmark = [pytest.mark.ray, pytest.mark.s3]
Starter = Callable[..., HostRun]


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    with Hosts(num_hosts=3, cpus=1) as hosts:
        hosts.give_credentials(ACCESS_KEY, SECRET_KEY)
        yield hosts


@pytest.fixture(scope="module")
def store(hosts: Hosts) -> Iterator[SeaweedServer]:
    server = SeaweedServer(host=hosts.bridge_ip)
    yield server
    server.stop()


def undisturbed(root: Path, ranks: int) -> dict[int, float]:
    """Losses of the same run under torchrun, without Ray and without S3."""
    done = run_torchrun(small_config(root, NAME), root / "straight", ranks)
    assert done.returncode == 0, done.stderr[-3000:]
    return losses(root, NAME)


@pytest.fixture(scope="module")
def straight(tmp_path_factory) -> dict[int, float]:
    return undisturbed(tmp_path_factory.mktemp("straight"), 2)


@pytest.fixture
def start(hosts: Hosts, store: SeaweedServer, tmp_path: Path) -> Iterator[Starter]:
    """Start a run; afterwards its driver is gone and all hosts are there again."""
    runs: list[HostRun] = []

    def start(loss: str = "slow_loss", **sections) -> HostRun:
        bucket = f"s3://{store.shared_bucket}/{tmp_path.name}"
        runs.append(HostRun(hosts, tmp_path, bucket, store.endpoint_url, sections, loss).start())
        return runs[-1]

    yield start
    for run in runs:
        if run.process is not None and run.process.poll() is None:
            run.process.kill()
            run.process.wait()
    hosts.mend()


def test_a_spot_notice_is_answered_with_a_checkpoint_and_another_host(hosts, start, straight) -> None:
    run = start(failure={"notice_file": str(hosts.local / "notice"), "max_failures": 0})
    run.until_step(6)
    going = run.host_of_rank(1)
    (going.folder / "local" / "notice").write_text("the spot market wants it back")
    run.until(lambda: len(run.events("ranks")) == 2, "the next attempt")
    assert going.index not in {run.host_of_rank(rank).index for rank in (0, 1)}
    run.ends_well(straight)
    [first, second] = [event["step"] for event in run.events("start")]
    [pause] = run.events("pause")
    assert first == 0 and 6 <= second < STEPS and pause["reason"].startswith("node drained: ")
    assert not run.events("failure"), "a planned end is none, and takes nothing from a budget of 0"
    assert max(line["step"] for line in read_lines(run.root / NAME / "journal.jsonl")) == STEPS
    assert second in {event["step"] for event in run.events("checkpoint")}, "saved at the step where it was left"


def test_a_host_that_is_gone_is_replaced_by_another(hosts, start, straight) -> None:
    run = start()
    run.until_step(12, saved=10)
    hosts.kill(run.host_of_rank(1))
    run.ends_well(straight)
    assert [event["step"] for event in run.events("start")] == [0, 10]
    failures = run.events("failure")  # what remains of the group may first try to go on in place
    assert failures[-1]["kind"] in ("node lost", "killed") and {each["decision"] for each in failures} == {"restart"}


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_that_is_ended_or_stopped_is_replaced(hosts, start, straight, number) -> None:
    run = start(failure={"hang_floor_s": 8.0})
    pids = run.until_step(12, saved=10)
    os.kill(pids[1], number)
    run.ends_well(straight)
    [failure] = run.events("failure")
    assert failure["kind"] == ("killed" if number == signal.SIGKILL else "hang")


@pytest.mark.slow
def test_an_exception_on_one_rank_is_forgiven(start, straight) -> None:
    run = start("stumbling_loss")
    run.ends_well(straight)
    [failure] = run.events("failure")
    assert failure["kind"] == "exception" and failure["failed_step"] == 7


@pytest.mark.slow
def test_a_host_that_is_cut_off_for_a_minute_does_not_hold_up_the_run(hosts, start, straight) -> None:
    run = start(failure={"lost_driver_s": 20.0})
    pids = run.until_step(12, saved=10)
    cut = run.host_of_rank(1)
    hosts.cut(cut)
    cut_at = time.monotonic()
    run.until(lambda: len(run.events("ranks")) == 2, "the next attempt")
    assert_gone([pids[1]], limit_s=60)  # of the cut host, on its own
    time.sleep(max(0.0, 60 - (time.monotonic() - cut_at)))
    hosts.heal(cut)
    run.ends_well(straight)


@pytest.mark.slow
def test_a_zombie_that_trained_on_behind_a_cut_cannot_commit(hosts, store, start, tmp_path, monkeypatch) -> None:
    """One worker: cut off, it trains on alone, and needs nothing but S3 to commit when the cable is back.

    Its raylet, which would end it then, is stopped; so is its own look after the driver, and there is no
    supervisor, which would miss the board. Only the fence is left.
    """
    set_aws_environment(monkeypatch, store.env)
    straight = undisturbed(tmp_path / "alone", 1)
    run = start(
        scaling={"num_workers": 1}, run={"root": str(hosts.local)}, failure={"lost_driver_s": 0.0, "in_place": False},
        tracking={"mlflow": False}, storage={"max_attempts": 60},
    )  # fmt: skip
    own = open_store(f"{run.checkpoints}/{NAME}/checkpoints", S3Options(endpoint_url=store.endpoint_url))
    run.until(lambda: 5 in committed_steps(own), "the checkpoint of step 5")
    [cut] = [host for host in hosts.hosts if (host.folder / "local" / NAME / "journal.jsonl").exists()]
    [zombie] = worker_pids(cut.folder / "local", NAME)
    hosts.cut(cut)
    for pid in cut.pids_of("raylet"):
        os.kill(pid, signal.SIGSTOP)
    run.until(lambda: open_generations(own) == 2, "another attempt")
    assert Path(f"/proc/{zombie}").exists()
    hosts.heal(cut)
    assert_gone([zombie], limit_s=300)
    assert "a newer start of this run has taken over" in cut.logs()
    assert run.process is not None and run.process.wait(timeout=900) == 0, run.tail()
    steps = committed_steps(own)
    assert steps[-1] == STEPS
    tags = {step: str(open_checkpoint(own, step_folder(step))[1].generation) for step in steps}
    start_of_2 = min(step for step, tag in tags.items() if tag.startswith("2-")) - 5
    assert all(tag.startswith("1-" if step <= start_of_2 else "2-") for step, tag in tags.items())
    [other] = [h for h in hosts.hosts if h != cut and (h.folder / "local" / NAME / "journal.jsonl").exists()]
    both = losses(cut.folder / "local", NAME) | losses(other.folder / "local", NAME)
    assert both == straight


def open_generations(store) -> int:
    return sum(key.endswith(".json") for key in store.list("generations/"))


@pytest.mark.slow
def test_a_driver_that_is_killed_goes_on_with_the_same_command(start, straight) -> None:
    run = start()
    pids = run.until_step(12, saved=10)
    assert run.process is not None
    run.process.kill()
    run.process.wait()
    assert_gone(pids, limit_s=30)
    run.start()
    run.ends_well(straight)
    assert [event["step"] for event in run.events("start")] == [0, 10]


@pytest.mark.slow
def test_a_head_that_is_killed_and_started_anew_goes_on_with_the_same_command(hosts, start, straight) -> None:
    run = start(failure={"lost_driver_s": 20.0})
    pids = run.until_step(12, saved=10)
    hosts.kill(hosts.hosts[0])
    assert run.process is not None and run.process.wait(timeout=30) != 0
    assert_gone(pids, limit_s=90)
    hosts.mend()
    run.start()
    run.ends_well(straight)
    starts = [event["step"] for event in run.events("start")]
    assert starts[0] == 0 and 0 not in starts[1:], "what the workers still did without a head counts"

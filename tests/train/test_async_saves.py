"""A run whose checkpoints are saved behind its back: what stands still, what is counted, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time

import pytest

from raydz.checkpoint import snapshot
from raydz.checkpoint.background import BackgroundSaves
from raydz.errors import CheckpointError, StorageError
from raydz.storage.local import LocalStore
from raydz.train.saving import ending_on_sigterm, heed_sigterm
from tests.checkpoint.states import assert_same_bits, stored_tensors
from tests.train.runs import (
    Interrupted,
    InterruptingLoss,
    column,
    environment,
    manifests,
    run,
    run_config,
    run_on_rank,
    try_on_rank,
    write_config,
)
from tests.train.test_spikes import BadSteps, spiky


def events(folder, name, run_name="a"):
    lines = map(json.loads, (folder / f"runs/{run_name}/events.jsonl").read_text().splitlines())
    return [line for line in lines if line["event"] == name]


@pytest.fixture
def slow_store(monkeypatch):
    """Data files take this long; the manifest follows at once."""
    usual, seconds = LocalStore.writer, {"each": 0.0}

    def writer(self, key, expected_bytes=None):
        time.sleep(seconds["each"])
        return usual(self, key, expected_bytes)

    monkeypatch.setattr(LocalStore, "writer", writer)
    return seconds


# -- in training's way ------------------------------------------------------------------------------------------------


def test_blocking_is_what_stood_still_and_the_rest_is_told_apart(tmp_path, monkeypatch, slow_store):
    slow_store["each"] = 0.5
    usual_fill, usual_finish, waiting = snapshot.fill_image, BackgroundSaves.finish_snapshot, threading.Event()

    def late(plan, image):
        assert waiting.wait(30)
        time.sleep(0.2)
        usual_fill(plan, image)
        waiting.clear()

    def finish(self):
        if self._current is not None and not self._current._copied.is_set():
            waiting.set()
        usual_finish(self)

    monkeypatch.setattr(snapshot, "fill_image", late)
    monkeypatch.setattr(BackgroundSaves, "finish_snapshot", finish)
    run(run_config(tmp_path, checkpoint={"every": 3, "at_end": False}, train={"steps": 5}))
    blocked = column(tmp_path, "checkpoint_blocking_s")
    assert [step for step, value in enumerate(blocked, 1) if value] == [4]
    saved = events(tmp_path, "checkpoint")
    assert [event["step"] for event in saved] == [3]
    assert saved[0]["blocked_s"] == pytest.approx(blocked[3])
    assert 0.2 < blocked[3] < saved[0]["seconds"] - 0.45, "the snapshot, and not the store"
    folder = tmp_path / "runs/a/checkpoints/step-0000000003"
    assert saved[0]["bytes"] == sum(path.stat().st_size for path in folder.rglob("*.safetensors"))


def test_saves_at_once_stand_still_for_all_of_it(tmp_path, slow_store):
    slow_store["each"] = 0.3
    run(run_config(tmp_path, checkpoint={"every": 3, "async_save": False}))
    assert column(tmp_path, "checkpoint_blocking_s")[3] > 0.3
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [3, 6]


@pytest.mark.parametrize(("policy", "saved"), [("wait", [1, 2, 3, 4, 5, 6]), ("skip", [1, 6])])
def test_save_that_comes_too_early_waits_or_is_left_out(tmp_path, monkeypatch, policy, saved):
    """The first save ends only when step 6 is done, or when somebody waits for it."""
    from raydz.checkpoint import SaveHandle

    may_end, usual_wait, usual_writer = threading.Event(), SaveHandle.wait, LocalStore.writer

    def wait(self, timeout_s=None):
        may_end.set()
        return usual_wait(self, timeout_s)

    def writer(self, key, expected_bytes=None):
        assert may_end.wait(30)
        return usual_writer(self, key, expected_bytes)

    monkeypatch.setattr(SaveHandle, "wait", wait)
    monkeypatch.setattr(LocalStore, "writer", writer)
    run(run_config(tmp_path, checkpoint={"every": 1, "in_flight": policy}))
    assert manifests(tmp_path) == [f"step-{step:010d}" for step in saved]
    skipped = [(event["step"], event["in_flight"]) for event in events(tmp_path, "checkpoint_skipped")]
    assert skipped == ([] if policy == "wait" else [(2, 1), (3, 1), (4, 1), (5, 1)])


# -- failures ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def failing_steps(monkeypatch):
    steps: set[int] = set()
    usual = LocalStore.writer

    def writer(self, key, expected_bytes=None):
        if any(key.startswith(f"step-{step:010d}/") for step in steps):
            raise StorageError("the disk is full", where=key)
        return usual(self, key, expected_bytes)

    monkeypatch.setattr(LocalStore, "writer", writer)
    return steps


def test_failures_are_counted_in_a_metric_and_do_not_add_up_over_good_ones(tmp_path, failing_steps):
    failing_steps |= {1, 3}
    run(run_config(tmp_path, checkpoint={"every": 1, "max_failures_in_row": 2}))
    failures = column(tmp_path, "checkpoint_failures")
    assert failures[0] is None and failures[-1] == 2.0
    assert [event["in_row"] for event in events(tmp_path, "checkpoint_failed")] == [1, 1]


@pytest.mark.parametrize("is_async", [True, False])
def test_number_of_failures_that_ends_a_run_is_configured(tmp_path, failing_steps, is_async):
    failing_steps |= {2}
    with pytest.raises(CheckpointError, match="not saved"):
        run(run_config(tmp_path, checkpoint={"max_failures_in_row": 1, "async_save": is_async}))
    assert [event["step"] for event in events(tmp_path, "checkpoint_failed")] == [2]


def train_through(rank, world_size, config, env):
    os.environ.update(env)
    try:
        return try_on_rank(rank, world_size, config)
    finally:
        for name in env:
            del os.environ[name]


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize(("kind", "times", "status"), [("busy", 22, "Result"), ("busy", 10**6, "CheckpointError")])
def test_storm_of_503s_costs_saves_and_after_too_many_the_run(ranks, s3_env, tmp_path, kind, times, status):
    """One save of a rank is tried 10 times a round, in 4 rounds; the storm begins after the first checkpoint."""
    from tests.support.fault_proxy import Fault, fault_proxy

    bucket = s3_env.bucket()
    with fault_proxy(s3_env.endpoint_url) as proxy:

        def in_storm(method, path):
            return method == "PUT" and "step-" in path and "step-0000000001" not in path

        proxy.faults.append(Fault(kind, in_storm, times))
        config = run_config(
            tmp_path, checkpoint={"dir": f"s3://{bucket}/runs", "every": 1, "max_failures_in_row": 2},
            storage={"endpoint_url": proxy.endpoint_url, "max_attempts": 2},
        )  # fmt: skip
        told = ranks(2).run(train_through, config, s3_env.env)
    assert told[0] == told[1] and told[0][0] == status
    with_manifest = [
        entry["Key"].split("/")[-2]
        for entry in s3_env.client().list_objects_v2(Bucket=bucket)["Contents"]
        if entry["Key"].endswith("manifest.json")
    ]
    assert with_manifest[0] == "step-0000000001"
    failed = events(tmp_path, "checkpoint_failed")
    assert len(with_manifest) + len(failed) == (6 if status == "Result" else 3) and failed


# -- the end ----------------------------------------------------------------------------------------------------------


def test_error_in_training_lets_the_save_in_flight_end(tmp_path, slow_store):
    slow_store["each"] = 0.4
    with pytest.raises(Interrupted):
        run(run_config(tmp_path), loss=InterruptingLoss(4))
    assert manifests(tmp_path) == ["step-0000000002", "step-0000000004"]
    assert [event["step"] for event in events(tmp_path, "checkpoint")] == [2, 4]


def test_error_in_training_waits_no_longer_than_it_may(tmp_path, monkeypatch):
    may_end, usual = threading.Event(), LocalStore.writer

    def writer(self, key, expected_bytes=None):
        assert may_end.wait(30)
        return usual(self, key, expected_bytes)

    monkeypatch.setattr(LocalStore, "writer", writer)
    with pytest.raises(Interrupted):
        run(run_config(tmp_path, checkpoint={"exit_wait_s": 0.1}), loss=InterruptingLoss(2))
    (failed,) = events(tmp_path, "checkpoint_failed")
    assert failed["step"] == 2 and "ended before" in failed["error"] and not manifests(tmp_path)
    may_end.set()
    for thread in threading.enumerate():
        if thread.name == "raydz-save":
            thread.join(10)


def test_rewinding_waits_for_the_checkpoint_in_flight(tmp_path, slow_store):
    """Which one is the newest depends on the steps, not on the disk."""
    slow_store["each"] = 0.5
    config = spiky(tmp_path, "rewind", every=4)
    run(config, loss=BadSteps({5: 5.0}))
    assert [event["done"] for event in events(tmp_path, "loss_spike")] == ["rewound to step-0000000004"]


_TERMINATED = """
import sys, time
from raydz.storage.local import LocalStore
from raydz.train.__main__ import main
usual = LocalStore.writer
def writer(self, key, expected_bytes=None):
    if key.startswith("step-0000000004"):
        print("saving", flush=True)
        time.sleep(1)
    return usual(self, key, expected_bytes)
LocalStore.writer = writer
sys.exit(main(["--config", sys.argv[1]]))
"""


@pytest.mark.parametrize(("patience_s", "newest"), [(20, 4), pytest.param(0, 2, marks=pytest.mark.slow)])
def test_sigterm_gives_the_save_in_flight_its_chance(tmp_path, patience_s, newest):
    config = run_config(tmp_path, train={"steps": 100000}, checkpoint={"exit_wait_s": patience_s}, scheduler=None)
    config["checkpoint"]["every"] = 2
    path = write_config(tmp_path, config)
    process = subprocess.Popen(
        [sys.executable, "-c", _TERMINATED, str(path)], cwd=tmp_path, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    while (line := process.stdout.readline()) != "saving\n":
        assert line, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGTERM
    assert manifests(tmp_path)[-1] == f"step-{newest:010d}"
    assert events(tmp_path, "finish")[-1]["status"] == "KILLED"


class Finalised:
    """Python ignores what its end raises."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_sigterm_that_comes_in_a_finaliser_is_heeded_at_the_end_of_the_step():
    with pytest.raises(SystemExit) as end, ending_on_sigterm():
        Finalised()
        heed_sigterm()
    assert end.value.code == 128 + signal.SIGTERM
    heed_sigterm()  # of the next run


# -- going on ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "bf16"),
    [pytest.param(1, False, marks=pytest.mark.slow), (2, True), pytest.param(3, False, marks=pytest.mark.slow)],
)
def test_run_interrupted_between_background_saves_goes_on_bit_for_bit(ranks, tmp_path, stage, bf16):
    shared = {"zero_optimization": {"stage": stage}, "bf16": {"enabled": bf16}, "checkpoint": {"every": 1}}
    whole = run_config(tmp_path, run={"name": "whole"}, **shared)
    whole["checkpoint"]["async_save"] = False
    ranks(2).run(run_on_rank, whole)
    told = ranks(2).run(try_on_rank, run_config(tmp_path, **shared), {"loss": InterruptingLoss(4)})
    assert [kind for kind, _ in told] == ["Interrupted"] * 2
    assert manifests(tmp_path)[-1] == "step-0000000004", "the save in flight had its chance"
    ranks(2).run(run_on_rank, run_config(tmp_path, **shared))
    for key in ("loss", "lr", "grad_norm", "tokens_seen"):
        assert column(tmp_path, key) == column(tmp_path, key, "whole"), key
    for step in (2, 6):  # before and after the interruption
        ends = [stored_tensors(tmp_path / f"runs/{name}/checkpoints/step-{step:010d}") for name in ("a", "whole")]
        assert_same_bits(*ends)

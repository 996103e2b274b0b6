"""Signals of the driver: the first asks, the second ends, and time is up when Ray says so."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from raydz.orchestrate.stop import StopSignals, StopWatch, time_to_stop
from tests.support.runs import losses, small_config, start_driver, wait_for_step


def strike(*numbers: int, after_s: float = 0.2) -> None:
    """Signals for this process, one after the other."""

    def send() -> None:
        for number in numbers:
            time.sleep(after_s)
            os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


class Work:
    """Ends once it is asked to, or after ten seconds."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.asked = threading.Event()

    def ask(self, reason: str) -> None:
        self.reasons.append(reason)
        self.asked.set()

    def __call__(self) -> str:
        return "saved" if self.asked.wait(10) else "not asked"


@pytest.mark.parametrize(
    ("number", "end"), [(signal.SIGINT, KeyboardInterrupt()), (signal.SIGTERM, SystemExit(143))], ids=["int", "term"]
)
def test_the_first_signal_asks_and_the_work_ends_by_itself(number, end):
    before, work = signal.getsignal(number), Work()
    with StopSignals() as signals:
        strike(number)
        assert signals.run(work, work.ask) == "saved"
        assert work.reasons == [signal.Signals(number).name] and signals.number == number
        assert (type(signals.end()), signals.end().args) == (type(end), end.args)
    assert signal.getsignal(number) is before


def test_the_second_signal_ends_at_once():
    work = Work()
    began = time.monotonic()
    with pytest.raises(SystemExit) as caught, StopSignals() as signals:
        strike(signal.SIGTERM, signal.SIGTERM)
        signals.run(work.__call__, lambda reason: None)
    assert caught.value.code == 143 and signals.is_urgent
    assert time.monotonic() - began < 5


def test_when_the_jobs_time_is_over_the_driver_leaves():
    with pytest.raises(SystemExit), StopSignals(limit_s=0.5) as signals:
        strike(signal.SIGTERM)
        signals.run(Work(), lambda reason: None)
    assert signals.number == signal.SIGTERM and not signals.is_urgent


def test_a_signal_between_two_attempts_starts_no_other():
    with pytest.raises(SystemExit), StopSignals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
        signals.run(lambda: pytest.fail("it began"), lambda reason: None)


def test_what_the_work_raises_comes_as_it_was():
    with pytest.raises(ZeroDivisionError), StopSignals() as signals:
        signals.run(lambda: 1 // 0, lambda reason: None)


def test_handlers_of_the_program_itself_stay():
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: heard.append(number))
    try:
        with StopSignals() as signals:
            os.kill(os.getpid(), signal.SIGTERM)
            assert signals.run(lambda: "done", lambda reason: None) == "done"
            assert heard == [signal.SIGTERM] and signals.number is None
    finally:
        signal.signal(signal.SIGTERM, before)


def test_in_another_thread_the_work_runs_in_it():
    seen = []

    def caller() -> None:
        with StopSignals() as signals:
            seen.append(signals.run(threading.current_thread, lambda reason: None))

    thread = threading.Thread(target=caller)
    thread.start()
    thread.join()
    assert seen == [thread]


@pytest.mark.parametrize(
    ("variables", "seconds"),
    [
        ({}, 0.0),  # no job: nobody counts
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}, 1.0),  # Ray's default of 3 s, less the margin, but not nothing
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "60"}, 57.0),
        ({"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}", "RAY_JOB_STOP_WAIT_TIME_S": "soon"}, 1.0),
        ({"RAY_JOB_STOP_WAIT_TIME_S": "60"}, 0.0),
    ],
)
def test_time_to_stop_is_what_ray_leaves_a_job(monkeypatch, variables, seconds):
    for name in ("RAY_JOB_CONFIG_JSON_ENV_VAR", "RAY_JOB_STOP_WAIT_TIME_S"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert time_to_stop() == seconds


def test_ranks_that_do_not_look_start_no_thread():
    before = threading.active_count()
    with StopWatch(None, looks=False) as watch:
        assert watch() is None and threading.active_count() == before


@pytest.mark.slow
@pytest.mark.ray
def test_ctrl_c_of_a_driver_saves_and_the_same_call_goes_on(ray_cluster, tmp_path: Path) -> None:
    train = {"steps": 60, "eval_every": 0}
    config = small_config(tmp_path, "interrupted", train=train, checkpoint={"every": 0, "at_end": True})
    options = {"config": config, "loss": "slow_loss"}
    process = start_driver(options, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "interrupted", 5, process, limit_s=300)
    process.send_signal(signal.SIGINT)
    code = process.wait(timeout=120)
    text = (tmp_path / "driver" / "driver.log").read_text()
    assert code != 0 and text.rstrip().endswith("KeyboardInterrupt"), text[-3000:]
    last = max(losses(tmp_path, "interrupted"))
    assert last < 60 and f"was stopped after step {last} of 60" in text
    (manifest,) = (tmp_path / "interrupted" / "checkpoints").glob("*/manifest.json")
    assert manifest.parent.name == f"step-{last:010d}"

    again = start_driver(options, tmp_path / "again", ray_cluster.env)
    assert again.wait(timeout=400) == 0, (tmp_path / "again" / "driver.log").read_text()[-3000:]
    assert sorted(losses(tmp_path, "interrupted")) == list(range(1, 61))

"""What a slow step says of itself. Oracles: waits made up, and waits of real steps on a tier that is made slow."""

from __future__ import annotations

import logging
import time
from typing import Any

import pytest

from raydz.config import EngineConfig
from raydz.config.deepspeed import KEYS
from raydz.offload.explain import CAUSES, SlowSteps, explanation, figures_of, offload_wait_share, waits_of
from raydz.offload.speculation import OffloadStep
from tests.offload.training import RUN, engine_of, hosted
from tests.zero.training import train_step

KEY_PARTS = {part for path in KEYS for part in path.split(".")}


def offload_step(**changes) -> OffloadStep:
    settings = {"mode": "waiting", "rolled_back": False, "rollback_rate": 0.25, "waits_s": {}, "updating_s": 1.5}
    return OffloadStep(**{**settings, "ahead_s": 0.0, **changes})


@pytest.mark.parametrize("cause", CAUSES)
def test_the_line_names_the_longest_wait_its_figures_and_a_key(cause):
    waits = dict.fromkeys(CAUSES, 0.01) | {cause: 0.6}
    line = explanation(7, 2.0, waits, {cause: "measured so"})
    assert line.startswith("step 7 took 2.000 s and waited 0.670 s of it for offload")
    assert f"30% for {CAUSES[cause].what} (measured so)" in line
    assert CAUSES[cause].limit in line and CAUSES[cause].remedy in line
    assert line.index(f"{cause} 0.600 s") < line.index("0.010 s"), "the longest first"
    assert "\n" not in line


def test_every_remedy_names_keys_that_exist():
    """A key that is renamed must be renamed in what is advised."""
    ours = set(type(EngineConfig().parallel).model_fields)
    sections = {"parallel", "aio", "bf16", "offload_optimizer", "offload_param", "zero_optimization"}
    sections |= {"activation_checkpointing"}
    for name, cause in CAUSES.items():
        dotted = [word.strip(",;()").split(".") for word in cause.remedy.split() if "." in word.strip(".,;()")]
        assert dotted or "gradient_clipping" in cause.remedy, name
        for section, *key in dotted:
            assert section in sections, (name, section)
            assert set(key) <= (ours if section == "parallel" else KEY_PARTS | AIO), (name, key)


AIO = {"queue_depth", "block_size", "cpu_checkpointing"}


@pytest.mark.parametrize(("waited_s", "says"), [(0.0, False), (0.1, False), (0.101, True), (5.0, True)])
def test_a_step_speaks_when_its_waits_exceed_the_share(waited_s, says):
    verdict = SlowSteps(above=0.1).judge(3, 1.0, {"update": waited_s})
    assert (verdict.line is not None) is says
    assert verdict.then.last == (3 if says else None)


def test_the_waits_count_together():
    verdict = SlowSteps(above=0.1).judge(3, 1.0, {"update": 0.06, "return": 0.05})
    assert verdict.line is not None and "for updates on the CPU" in verdict.line


def test_it_speaks_once_in_so_many_steps_and_anew_after_a_resume():
    slow, spoke = SlowSteps(above=0.1, every=100), []
    for step in [*range(1, 251), 40, 41]:
        verdict = slow.judge(step, 1.0, {"disk_read": 0.5})
        spoke += [step] if verdict.line else []
        slow = verdict.then
    assert spoke == [1, 101, 201, 40]


def test_a_step_without_waits_or_time_says_nothing():
    assert SlowSteps().judge(1, 1.0, {}).line is None
    assert SlowSteps(above=0.0).judge(1, 0.0, {"update": 1.0}).line is None
    assert offload_wait_share(0.0, {"update": 1.0}) == 0.0
    assert offload_wait_share(2.0, {"update": 0.5, "return": 0.25}) == 0.375


def test_updates_that_were_made_again_count_as_rolled_back():
    waits = {"update": 0.4, "gradient": 0.1}
    undone = offload_step(mode="speculative", rolled_back=True, waits_s=waits)
    assert waits_of(undone) == {"rollback": 0.4, "gradient": 0.1}
    for kept in (offload_step(waits_s=waits, rolled_back=True), offload_step(waits_s=waits, mode="speculative")):
        assert waits_of(kept) == waits
    assert figures_of(undone)["rollback"] == "25% of recent steps"
    line = SlowSteps().judge(1, 1.0, waits_of(undone), figures_of(undone)).line
    assert line is not None and "parallel.offload_update" in line and "25% of recent steps" in line


def slowed(target: Any, name: str, seconds: float) -> None:
    """Let every call of a method sleep first."""
    method = getattr(target, name)

    def slow(*args: Any, **more: Any) -> Any:
        time.sleep(seconds)
        return method(*args, **more)

    setattr(target, name, slow)


def steps_of(rank: int, world_size: int, config: dict[str, Any], slow: str) -> tuple[list[str], list[float], float]:
    """The lines of a training with one part made slow, each step's offload_wait_share and the last rollback rate."""
    from raydz.offload.aio import Transfer
    from raydz.train import figures

    engine, lines, shares = engine_of(RUN, config), [], []
    watch = figures.StepWatch(engine, None)
    figures._logger.addHandler(Lines(lines))
    figures._logger.setLevel(logging.INFO)
    pipeline = engine.optimizer.pipeline
    parts = {"updates": (pipeline, "_advance"), "disk": (Transfer, "wait")}
    slowed(*parts[slow], 0.03)
    for step in range(1, 4):
        watch.start()
        watch.data_arrived()
        _, report = train_step(engine, RUN, rank, world_size, step)
        found = watch.stop(report, 10)
        shares.append(found["offload_wait_share"])
    engine.destroy()
    return lines, shares, found["offload_rollback_rate"]


class Lines(logging.Handler):
    """Keeps what is said."""

    def __init__(self, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.mark.native
def test_slow_updates_of_a_real_training_are_explained(ranks):
    config = hosted(RUN.config(), "waiting")
    config["parallel"] = config["parallel"] | {"offload_explain_above": 0.01}
    ((lines, shares, rate),) = ranks(1).run(steps_of, config, "updates")
    (line,) = lines  # of several slow steps the first one speaks
    assert CAUSES["update"].limit in line and "parallel.offload_threads" in line
    assert 0.01 < max(shares) <= 1.0 and 0.0 < rate < 1.0


@pytest.mark.native
def test_a_slow_disk_of_a_real_training_is_explained(ranks, tmp_path):
    config = hosted(RUN.config(), device="nvme", nvme_path=str(tmp_path), buffer_count=3)
    config["parallel"] = config["parallel"] | {"host_memory_budget": 84 << 10, "offload_explain_above": 0.01}
    ((lines, shares, rate),) = ranks(1).run(steps_of, config, "disk")
    (line,) = lines
    assert "disk's" in line and "offload_optimizer.buffer_count" in line
    assert 0.01 < max(shares) <= 1.0 and 0.0 < rate < 1.0


@pytest.mark.native
def test_a_share_of_the_key_that_is_not_reached_says_nothing(ranks):
    config = hosted(RUN.config(), "waiting")
    config["parallel"] = config["parallel"] | {"offload_explain_above": 0.99}
    ((lines, shares, rate),) = ranks(1).run(steps_of, config, "updates")
    assert lines == []
    assert 0.0 < max(shares) < 0.99 and 0.0 < rate < 1.0

"""raydz.fit from where people try things: an interactive Python, within an event loop, within another Ray program."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.console import Console
from tests.support.runs import REPOSITORY, losses, read_lines, run_torchrun, small_config, wait_for_step

pytestmark = pytest.mark.ray

OWN = """
import asyncio, signal, threading, time
import torch
import raydz

class Bigram(torch.nn.Module):
    def __init__(self, vocab_size):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab_size, 16)
        self.head = torch.nn.Linear(16, vocab_size)

    def forward(self, input_ids):
        return self.head(self.embedding(input_ids))

def build(config):
    return Bigram(config.data.tokenizer.vocab_size)

pause_s = 0.0

def loss(model, batch):
    time.sleep(pause_s)
    logits = model(batch["input_ids"]).flatten(0, 1)
    return torch.nn.functional.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")
"""
LEFT = """
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler,
      [t.name for t in threading.enumerate() if t.name.startswith("raydz")])
"""


def starts(root: Path, name: str) -> list[int]:
    return [event["step"] for event in read_lines(root / name / "events.jsonl") if event["event"] == "start"]


@pytest.mark.slow
def test_interrupted_and_called_again_within_an_event_loop(ray_cluster, tmp_path: Path) -> None:
    """Functions of `__main__` travel; Ctrl-C saves and gives the prompt back; the same call goes on from there."""
    config = small_config(tmp_path, "own", train={"steps": 40, "eval_every": 0}, checkpoint={"every": 0})
    with Console(tmp_path / "console", ray_cluster.env) as console:
        console.run(OWN)

        def strike() -> None:
            wait_for_step(tmp_path, "own", 3, console.process, limit_s=240)
            console.interrupt()

        said = console.run(f"pause_s = 0.3; raydz.fit({config!r}, model=build, loss=loss)", while_running=strike)
        assert "SIGINT: saving a checkpoint" in said and "KeyboardInterrupt" in said, said[-2000:]
        assert console.run(LEFT).split("\n")[-2].endswith("True []")
        stopped_at = max(losses(tmp_path, "own"))
        assert 3 <= stopped_at < 40
        said = console.run(
            f"async def cell():\n    return raydz.fit({config!r}, model=build, loss=loss)\n"
            "pause_s = 0.0; result = asyncio.run(cell()); print(result.status, result.step)"
        )
        assert "finished 40" in said, said[-2000:]
        assert console.run(LEFT).split("\n")[-2].endswith("True []")
    assert starts(tmp_path, "own") == [0, stopped_at]
    assert sorted(losses(tmp_path, "own")) == list(range(1, 41))


@pytest.mark.slow
def test_on_a_cluster_of_its_own_and_in_a_thread_of_the_event_loop(ray_cluster, tmp_path: Path) -> None:
    """As `await asyncio.to_thread(…)` in a notebook: signals are left alone, and what is too large is still said."""
    env = {name: value for name, value in ray_cluster.env.items() if name != "RAY_ADDRESS"}
    config = small_config(tmp_path, "local", train={"steps": 3, "eval_every": 0}, scaling={"num_workers": 1})
    large = small_config(tmp_path, "large", scaling={"num_workers": 1, "cpus_per_worker": 500.0})
    with Console(tmp_path / "console", env) as console:
        console.run("import asyncio, signal, threading, raydz")
        said = console.run(f"result = asyncio.run(asyncio.to_thread(raydz.fit, {config!r})); print(result.step)")
        assert said.rstrip().endswith("3"), said[-2000:]
        said = console.run(f"raydz.fit({large!r})", limit_s=60)
        assert "PlacementError" in said and "500 CPU" in said, "a cluster that fit itself started cannot grow"
        assert console.run(LEFT).split("\n")[-2].endswith("True []")


NESTED = """
import json, sys
import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

def train(config):
    import dataclasses, raydz
    return dataclasses.asdict(raydz.fit(config))

@ray.remote(num_cpus=1)
class Study:
    def train(self, config):
        return train(config)

ray.init()
where, config = sys.argv[1], json.loads(sys.argv[2])
if where == "task":
    group = placement_group([{"CPU": 1}])
    ray.get(group.ready())
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_capture_child_tasks=True)
    result = ray.get(ray.remote(train).options(num_cpus=1, scheduling_strategy=strategy).remote(config))
else:
    result = ray.get(Study.remote().train.remote(config))
print("RESULT", json.dumps(result, default=str))
"""


@pytest.mark.slow
@pytest.mark.parametrize("where", ["task", "actor"])
def test_from_within_another_ray_program(ray_cluster, tmp_path: Path, where: str) -> None:
    """A task whose placement group captures its children (all of it taken by the task), and an actor's method."""
    config = small_config(tmp_path, where, train={"steps": 6, "eval_every": 0})
    script = tmp_path / "study.py"
    script.write_text(NESTED)
    done = subprocess.run(
        [sys.executable, str(script), where, json.dumps(config)],
        env={**ray_cluster.env, "PYTHONPATH": str(REPOSITORY)}, cwd=tmp_path, capture_output=True, text=True,
        timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    [line] = re.findall(r"^RESULT (.*)$", done.stdout, flags=re.M)
    assert json.loads(line)["status"] == "finished"
    oracle = small_config(tmp_path, "torchrun", train={"steps": 6, "eval_every": 0})
    assert run_torchrun(oracle, tmp_path / "t", ranks=2).returncode == 0
    assert losses(tmp_path, where) == losses(tmp_path, "torchrun")

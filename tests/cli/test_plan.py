"""`raydz plan`: the table, the words, JSON, at once and without torch."""

from __future__ import annotations

import json
import time

import pytest

from raydz.config import load
from raydz.plan import decoder_planner
from tests.cli.conftest import ROOT, run_raydz

DEMO = ROOT / "jobs" / "configs" / "demo.yaml"
ARTICLE = ROOT / "jobs" / "configs" / "article_zero3.json"
SEVEN = ("--params", "7e9", "--layers", "32", "--hidden", "4096")


def test_the_articles_file_is_planned_without_torch_and_within_seconds():
    started = time.perf_counter()
    result = run_raydz("plan", "--config", str(ARTICLE), *SEVEN, blocked=("torch", "ray", "mlflow", "numpy"))
    assert time.perf_counter() - started < 20  # a second on a quiet machine; importing torch alone would fail above
    assert result.returncode == 0, result.stderr
    assert "7.0G parameters" in result.stdout
    assert "1024 rows a step = 8 * 16 * 8 ranks" in result.stdout
    assert "host │" in result.stdout.replace("┃", "│") and "offload keeps" in result.stdout
    assert "first right: stage 2" in result.stdout


def test_the_json_holds_the_plans_of_every_stage_and_number_of_ranks(raydz_command):
    result = raydz_command("plan", "--config", DEMO, "--device", "cpu", "--ranks", 2, "--ranks", 3, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert [(p["ranks"], p["stage"]) for p in found["plans"]] == [(n, s) for n in (2, 3) for s in range(4)]
    planner = decoder_planner(load(DEMO), "cpu")
    for plan in found["plans"]:
        assert plan == planner.at(plan["ranks"], stage=plan["stage"]).as_json()
    assert found["asked"]["stage"] == 3
    assert found["advice"] and found["offload"] == {}


def test_a_table_has_a_row_a_stage_with_the_bytes_of_the_plan(raydz_command):
    result = raydz_command("plan", "--config", DEMO, "--device", "cpu", "--ranks", 2)
    rows = [line.split("│") for line in result.stdout.splitlines() if line.startswith("│")]
    assert [row[2].strip() for row in rows] == ["0", "1", "2", "3"]
    planner = decoder_planner(load(DEMO), "cpu")
    for row, stage in zip(rows, range(4), strict=True):
        plan = planner.at(2, stage=stage)
        figures = plan.memory.model_states, plan.memory.total, plan.snapshot_bytes, plan.traffic.total
        assert [float(cell) for cell in row[-5:-1]] == pytest.approx([value / 2**20 for value in figures], abs=0.06)
    assert "offload" not in result.stdout.replace("without offload", "")


def test_overrides_and_memory_decide_what_is_recommended(raydz_command):
    def planned(*options: str) -> str:
        return raydz_command("plan", "--config", ARTICLE, *SEVEN, "--set", "bf16.enabled=true", *options).stdout

    assert "first right: stage 2, no offload" in planned("--memory", "80GiB")
    assert "ranks do: stage 3" in planned("--memory", "8GiB")
    assert "activation_checkpointing" in planned("--memory", "40GiB", "--set", "data.sequence_length=8192")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--config", str(ARTICLE)), "nothing says how large the model is"),
        (("--config", str(DEMO), "--memory", "much"), "not a size in bytes"),
        (("--config", str(DEMO), "--device", "tpu"), "cpu or cuda"),
        (("--config", str(DEMO), "--set", "parallel.shard_size=2", "--ranks", "3"), "parallel.shard_size"),
        (("--config", "no-such.yaml"), "cannot be read"),
    ],
)
def test_what_cannot_be_planned_is_a_typed_error(raydz_command, options, said):
    result = run_raydz("plan", *options)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr


def test_ranks_that_the_batch_does_not_fit_say_what_to_set(raydz_command):
    result = raydz_command("plan", "--config", ARTICLE, *SEVEN, "--ranks", 4)
    assert "4 ranks: needs gradient_accumulation_steps 32" in result.stdout

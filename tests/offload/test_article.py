"""The article's ZeRO-3 file, optimizer and parameters on the host: it trains on two CPU ranks and resumes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raydz.config import load
from tests.support.runs import losses, run_torchrun
from tests.train.runs import column, manifests, run_config, run_on_rank

ARTICLE = Path(__file__).parents[2] / "jobs/configs/article_zero3.json"
BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2}


def article(folder: Path, name: str, steps: int, *, on_host: bool = True) -> dict[str, Any]:
    """A run of the article's file; the batch is for two small ranks."""
    sections = json.loads(ARTICLE.read_text()) | BATCH
    zero = sections["zero_optimization"]
    assert zero["offload_optimizer"] == zero["offload_param"] == {"device": "cpu"}
    # of a small model all parameters are below the article's threshold, and then nothing is released
    zero["stage3_param_persistence_threshold"] = 100
    if not on_host:
        del zero["offload_optimizer"], zero["offload_param"]
    base = run_config(folder, run={"name": name}, train={"steps": steps}, model={"num_hidden_layers": 2})
    return {key: value for key, value in base.items() if key != "scheduler"} | sections


def test_the_command_that_the_run_file_names_loads_it_unchanged_but_for_the_batch() -> None:
    """`jobs/configs/article.yaml` says in its head how it is called."""
    head = ARTICLE.with_name("article.yaml").read_text().partition("deepspeed:")[0]
    overrides = re.findall(r"--set (\S+)", head)
    zero = load(ARTICLE.with_name("article.yaml"), overrides).zero_optimization
    assert len(overrides) == 4 and zero.stage == 3
    assert (zero.offload_optimizer.device, zero.offload_param.device) == ("cpu", "cpu")


def test_it_trains_resumes_and_equals_the_run_without_offload(ranks, tmp_path: Path) -> None:
    ranks(2).run(run_on_rank, article(tmp_path, "host", 2))
    assert manifests(tmp_path, "host") == ["step-0000000002"]
    ranks(2).run(run_on_rank, article(tmp_path, "host", 4))
    ranks(2).run(run_on_rank, article(tmp_path, "device", 4, on_host=False))
    assert column(tmp_path, "loss", "host") == column(tmp_path, "loss", "device")
    assert column(tmp_path, "grad_norm", "host") == column(tmp_path, "grad_norm", "device")


@pytest.mark.slow
def test_torchrun_trains_and_resumes_it(tmp_path: Path) -> None:
    for steps in (2, 4):
        done = run_torchrun(article(tmp_path, "host", steps), tmp_path / "torchrun", 2)
        assert done.returncode == 0, done.stderr[-3000:]
        assert f"finished at step {steps}" in done.stdout
    assert sorted(losses(tmp_path / "runs", "host")) == list(range(1, 5))

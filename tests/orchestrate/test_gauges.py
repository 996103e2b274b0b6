"""Figures of a run on the node's Prometheus endpoint, through a real Ray."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray

from raydz.orchestrate import gauges
from raydz.orchestrate.gauges import NAMES, Gauges
from raydz.tracking import METRICS
from tests.support.runs import losses, small_config, start_driver, wait_for_step


def test_every_row_of_the_table_has_a_gauge_with_a_name_prometheus_takes() -> None:
    assert set(NAMES) == {"step", *METRICS}
    assert all(re.fullmatch(r"raydz_[a-z][a-z0-9_]*", name) for name in NAMES.values())


def test_a_part_is_a_tag_and_what_is_not_finite_keeps_the_last_value(monkeypatch) -> None:
    shown: dict[tuple[str, str], float] = {}

    class Recorder:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            self.name, self.keys = name, tag_keys

        def set(self, value: float, tags: dict[str, str]) -> None:
            assert set(tags) == set(self.keys) and (tags["run"], tags["rank"]) == ("r", "0")
            shown[self.name, tags["part"]] = value

    monkeypatch.setattr(gauges, "Gauge", Recorder)
    told = Gauges("r")
    told(7, {"loss": 2.5, "eval_loss": 3.0, "eval_loss/news": 3.5})
    told(8, {"loss": float("nan")})
    assert shown == {
        ("raydz_step", ""): 8, ("raydz_loss", ""): 2.5, ("raydz_eval_loss", ""): 3.0, ("raydz_eval_loss", "news"): 3.5,
        ("raydz_restarts", ""): 0.0, ("raydz_lost_steps", ""): 0.0,
    }  # fmt: skip


def endpoint(cluster) -> str:
    """Where the cluster's only node exports metrics."""
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        [node] = ray.nodes()
        return f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    finally:
        ray.shutdown()


def exported(url: str, run: str) -> dict[str, float]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text = answer.read().decode()
    pattern = rf'^ray_(raydz_\w+)\{{[^}}]*part="",[^}}]*rank="0",[^}}]*run="{run}"[^}}]*\}} (\S+)$'
    return {name: float(value) for name, value in re.findall(pattern, text, flags=re.M)}


def events_in(root: Path) -> list[dict]:
    """Of the driver's log, each a JSON object in a line of its own."""
    log = (root / "driver" / "driver.log").read_text()
    return [json.loads(line) for line in re.findall(r"\{\"event\".*\}$", log, flags=re.M)]


@pytest.mark.slow
@pytest.mark.ray
def test_a_run_is_seen_by_prometheus_and_its_events_in_the_log(ray_cluster, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    url = endpoint(ray_cluster)
    config = small_config(tmp_path, "seen", train={"steps": 2000}, tracking={"log_json": True})
    process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", ray_cluster.env)
    wait_for_step(tmp_path, "seen", 2, process)
    wanted = {f"raydz_{name}" for name in ("step", "loss", "tokens_per_s", "step_time_s", "comm_share", "restarts")}
    found: dict[str, float] = {}
    while not wanted | {"raydz_memory_peak_bytes"} <= set(found):
        assert process.poll() is None, (tmp_path / "driver" / "driver.log").read_text()[-3000:]
        found = exported(url, "seen")
        time.sleep(0.5)
    journal = losses(tmp_path, "seen")
    step = int(found["raydz_step"])
    assert found["raydz_loss"] in [pytest.approx(journal[near]) for near in (step, step + 1) if near in journal]
    assert found["raydz_restarts"] == 0
    while not {"start", "plan", "ranks", "checkpoint"} <= {line["event"] for line in events_in(tmp_path)}:
        assert process.poll() is None
        time.sleep(0.5)
    process.kill()
    process.wait()

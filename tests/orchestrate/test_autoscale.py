"""A run on a cluster that Ray's autoscaler makes larger and smaller, with real nodes and without a cloud."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.orchestrate.test_elastic import (
    LIMIT_S,
    alone,
    assert_equals_alone,
    elastic_config,
    events_of,
    failures_of,
    sizes_of,
    wait_until,
)
from tests.support.autoscaler import autoscaled_cluster, lose_a_node, without_capacity
from tests.support.ray_nodes import living_nodes
from tests.support.runs import losses, read_lines, start_driver

pytestmark = [pytest.mark.ray, pytest.mark.slow]
__all__ = ["alone"]

COMPARED = 40


def has_saved(root: Path, workers: int) -> bool:
    """Whether the newest checkpoint is of a step that so many workers trained."""
    trained = {line["step"]: line["world_size"] for line in read_lines(root / "scales" / "journal.jsonl")}
    saved = [event["step"] for event in events_of(root, "scales", "checkpoint")]
    return bool(saved) and trained.get(saved[-1]) == workers


def test_nodes_come_for_a_run_one_is_lost_another_comes_and_all_go(alone: Path, tmp_path: Path) -> None:
    config = elastic_config(tmp_path, "scales", 5000)
    with autoscaled_cluster(tmp_path, max_nodes=2, idle_s=120) as cluster:
        assert living_nodes(cluster) == 1, "there is room for no worker"
        process = start_driver({"config": config, "loss": "slow_loss"}, tmp_path / "driver", cluster.env)

        def wait_for(*sizes: int) -> None:
            wait_until(lambda: sizes_of(tmp_path, "scales") == list(sizes), f"steps of {sizes} workers", process)

        wait_until(lambda: sizes_of(tmp_path, "scales"), "a node for the first worker, and on it", process)
        first = sizes_of(tmp_path, "scales")[:1]  # with a quick autoscaler there were two nodes at once
        wait_for(*first, *{2}.difference(first))
        first = sizes_of(tmp_path, "scales")
        assert living_nodes(cluster) == 3
        wait_until(lambda: has_saved(tmp_path, workers=2), "a checkpoint of two workers", process)
        with without_capacity(cluster):
            lose_a_node(cluster)
            wait_for(*first, 1)
        wait_for(*first, 1, 2)
        wait_until(lambda: len(losses(tmp_path, "scales")) >= COMPARED, "some steps more", process)
        process.send_signal(signal.SIGINT)
        assert process.wait(LIMIT_S) != 0, "Ctrl-C"
        deadline = time.monotonic() + LIMIT_S
        while living_nodes(cluster) > 1:
            assert time.monotonic() < deadline, "idle nodes stay"
            time.sleep(0.5)

    assert_equals_alone(tmp_path, "scales", alone, COMPARED)
    assert len(failures_of(tmp_path, "scales")) == 1
    ways = [(event["from"], event["to"]) for event in events_of(tmp_path, "scales", "resized")]
    assert ways == [*[(1, 2)] * (len(first) - 1), (2, 1), (1, 2)]

"""cluster/local.yaml and local.sh: Ray accepts the file, and nodes of this machine come, go and leave nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from copy import deepcopy
from pathlib import Path

import pytest
import yaml
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.support.runs import REPOSITORY

GROWS = """
import sys, time, ray
from ray.util.placement_group import placement_group, remove_placement_group
ray.init(address=sys.argv[1], logging_level="error")
alive = lambda: sum(node["Alive"] for node in ray.nodes())
print("nodes", alive())
group = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
print("placed", group.wait(120), alive())
remove_placement_group(group)
deadline = time.monotonic() + 180
while alive() > 1 and time.monotonic() < deadline:
    time.sleep(0.5)
print("left", alive())
"""


def test_ray_accepts_it_and_finds_its_provider():
    config = yaml.safe_load((REPOSITORY / "cluster" / "local.yaml").read_text())
    full = prepare_config(deepcopy(config))
    validate_config(full)
    assert config["provider"]["head_node_id"] == FAKE_HEAD_NODE_ID
    assert config["head_node_type"] == FAKE_HEAD_NODE_TYPE
    assert full["available_node_types"]["worker"]["resources"]["CPU"] == 1


@pytest.mark.slow
@pytest.mark.ray
def test_nodes_come_for_a_gang_and_go_when_idle(tmp_path: Path):
    checkout = tmp_path / "checkout"
    shutil.copytree(REPOSITORY / "cluster", checkout / "cluster")
    (checkout / ".venv").symlink_to(Path(sys.executable).parents[1])
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    env |= {"AUTOSCALE": "1", "LIMIT_S": "200"}
    script = ["bash", str(checkout / "cluster" / "local.sh")]
    temp = None
    try:
        started = subprocess.run([*script, "start"], env=env, capture_output=True, text=True, timeout=240)
        assert started.returncode == 0, started.stderr
        temp = (checkout / "runs" / ".cluster" / "temp").read_text().strip()
        address = started.stdout.partition("RAY_ADDRESS=")[2].split()[0]
        done = subprocess.run(
            [sys.executable, "-c", GROWS, address], env=env | {"RAY_AUTH_MODE": "disabled"}, capture_output=True,
            text=True, timeout=400,
        )  # fmt: skip
        said = [line for line in done.stdout.splitlines() if line.startswith(("nodes", "placed", "left"))]
        assert said == ["nodes 1", "placed True 3", "left 1"], done.stdout + done.stderr[-3000:]
    finally:
        subprocess.run([*script, "stop"], env=env, capture_output=True, timeout=60, check=True)
    deadline = time.monotonic() + 20
    while (left := processes_of(str(temp))) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert left == []


def processes_of(folder: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if folder in words:
            found.append(words)
    return found

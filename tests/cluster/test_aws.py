"""cluster/aws.yaml, checked without AWS: Ray's schema and preparation, EC2's own shapes, and what must fit together."""

from __future__ import annotations

import re
import subprocess
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.support.runs import REPOSITORY

FILE = REPOSITORY / "cluster" / "aws.yaml"
GPU_TYPES = ["gpu-spot", "gpu-on-demand"]


@pytest.fixture
def config() -> dict[str, Any]:
    return yaml.safe_load(FILE.read_text())


def prepared(config: dict[str, Any]) -> dict[str, Any]:
    full = prepare_config(deepcopy(config))
    validate_config(full)
    return full


def ec2_faults(node_config: dict[str, Any]) -> str:
    """What EC2's RunInstances would not understand, by botocore's description of it."""
    import botocore.session
    from botocore.validate import ParamValidator

    service = botocore.session.get_session().get_service_model("ec2")
    shape = service.operation_model("RunInstances").input_shape
    return ParamValidator().validate({**node_config, "MinCount": 1, "MaxCount": 1}, shape).generate_report()


def test_ray_accepts_and_prepares_it(config):
    full = prepared(config)
    types = full["available_node_types"]
    assert types["head"]["resources"] == {"CPU": 0, "GPU": 0}
    assert [types[name]["resources"]["GPU"] for name in GPU_TYPES] == [8, 8]
    assert all(types[name]["min_workers"] == 0 and types[name]["idle_timeout_s"] for name in GPU_TYPES)
    assert full["max_workers"] >= sum(types[name]["max_workers"] for name in GPU_TYPES)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda c: c.update(max_worker=3), "max_worker"),
        (lambda c: c["available_node_types"]["gpu-spot"].update(idle_timeout=3), "idle_timeout"),
        (lambda c: c["available_node_types"]["gpu-spot"]["resources"].update(GPU="8"), "8"),
        (lambda c: c.update(head_node_type="boss"), "head_node_type"),
    ],
)
def test_mistakes_are_found(config, change, where):
    change(config)
    with pytest.raises(Exception, match=where):
        prepared(config)


@pytest.mark.parametrize("name", ["head", *GPU_TYPES])
def test_ec2_knows_every_key_of_a_node(config, name):
    node_config = config["available_node_types"][name]["node_config"]
    assert ec2_faults(node_config) == ""
    assert "Typo" in ec2_faults({**node_config, "Typo": 1})


def test_spot_is_tried_first_and_on_demand_is_the_same_machine(config):
    spot, fallback = (deepcopy(config["available_node_types"][name]) for name in GPU_TYPES)
    assert spot["priority"] > fallback["priority"]
    assert spot["node_config"].pop("InstanceMarketOptions") == {"MarketType": "spot"}
    assert spot["node_config"] == fallback["node_config"] and spot["resources"] == fallback["resources"]


def test_the_efa_interfaces_in_the_comments_are_right_as_they_stand(config):
    lines = FILE.read_text().splitlines()
    first = next(i for i, line in enumerate(lines) if "# NetworkInterfaces:" in line)
    last = next(i for i in range(first + 1, len(lines)) if not lines[i].strip().startswith("#   -"))
    interfaces = yaml.safe_load("\n".join(line.replace("# ", "", 1) for line in lines[first:last]))
    node_config = config["available_node_types"]["gpu-spot"]["node_config"] | interfaces
    assert ec2_faults(node_config) == ""
    cards = interfaces["NetworkInterfaces"]
    assert [card["NetworkCardIndex"] for card in cards] == [0, 1, 2, 3]
    assert [card["DeviceIndex"] for card in cards] == [0, 1, 1, 1], "EC2 wants 0 on the first card alone"


def test_commands_are_shell_and_every_node_wants_the_token(config, tmp_path: Path):
    for command in config["initialization_commands"]:
        subprocess.run(["bash", "-n", "-c", command], check=True)
    inner = re.search(r"bash -ec '(.*)'", config["initialization_commands"][0], re.DOTALL)
    assert inner is not None and "'" not in inner[1], "a quote would end the script early"
    subprocess.run(["bash", "-n", "-c", inner[1]], check=True)
    for key in ("head_start_ray_commands", "worker_start_ray_commands"):
        start = config[key][-1]
        subprocess.run(["bash", "-n", "-c", start], check=True)
        assert "RAY_AUTH_MODE=token" in start and "--temp-dir=/mnt/raydz" in start
    assert "/home/ray/.ray/auth_token" in config["file_mounts"]
    assert "-v /mnt/raydz:/mnt/raydz" in config["docker"]["run_options"]


def test_the_image_names_the_installed_ray(config):
    assert config["docker"]["image"].endswith(f":{ray.__version__}")

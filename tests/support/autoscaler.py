"""A cluster whose nodes come and go with what is asked for: Ray's own autoscaler over nodes of this machine."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from tests.support.ray_cluster import RayCluster, port_for_ray, start_cluster, stop_cluster
from tests.support.runs import REPOSITORY


@contextmanager
def autoscaled_cluster(folder: Path, max_nodes: int, idle_s: float) -> Iterator[RayCluster]:
    """A head on which nothing trains, of `cluster/local.yaml`, with the autoscaler's word every second."""
    config = yaml.safe_load((REPOSITORY / "cluster" / "local.yaml").read_text())
    port, head = port_for_ray(), config["provider"]["head_node_id"]
    config |= {"max_workers": max_nodes, "idle_timeout_minutes": idle_s / 60}
    config["provider"]["gcs_address"] = f"127.0.0.1:{port}"
    config["available_node_types"]["worker"]["max_workers"] = max_nodes
    path = folder / "autoscaler.yaml"
    path.write_text(yaml.safe_dump(config))
    cluster = start_cluster(
        0, port=port, flags=[f"--autoscaling-config={path}"], RAY_FAKE_CLUSTER="1", RAY_enable_autoscaler_v2="1",
        RAY_CLOUD_INSTANCE_ID=head, RAY_OVERRIDE_NODE_ID_FOR_TESTING=head, AUTOSCALER_UPDATE_INTERVAL_S="1",
    )  # fmt: skip
    # a driver is no node: with the head's id in its environment it would be taken for the head
    for name in ("RAY_CLOUD_INSTANCE_ID", "RAY_OVERRIDE_NODE_ID_FOR_TESTING"):
        cluster.env.pop(name)
    try:
        yield cluster
    finally:
        stop_cluster(cluster)


@contextmanager
def without_capacity(cluster: RayCluster) -> Iterator[None]:
    """Nothing new comes meanwhile, as where the cloud has none left: the autoscaler is stopped."""
    [monitor] = [pid for pid in cluster.pids() if b"/monitor.py" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    os.kill(monitor, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(monitor, signal.SIGCONT)


def lose_a_node(cluster: RayCluster) -> str:
    """Kill the raylet of the newest node that the autoscaler brought, and with it the node; returns its id."""
    found: dict[str, int] = {}
    for pid in cluster.pids():
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        given = dict(pair.split(b"=", 1) for pair in variables if b"=" in pair)
        node_id = given.get(b"RAY_OVERRIDE_NODE_ID_FOR_TESTING", b"").decode()
        if command[0].endswith(b"/raylet") and not node_id.endswith("00000"):
            found[node_id] = pid
    assert found, "no node but the head"
    newest = max(found)
    os.kill(found[newest], signal.SIGKILL)
    return newest

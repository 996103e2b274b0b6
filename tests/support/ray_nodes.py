"""Further Ray nodes of a test's cluster, on this machine: added and lost at will."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ray._raylet import GcsClient
from ray.core.generated.gcs_pb2 import GcsNodeInfo

from tests.support.ray_cluster import BIN, RayCluster, port_for_ray, start_cluster, stop_cluster


class RayNodes:
    """The nodes of a cluster whose head trains nothing."""

    def __init__(self, cluster: RayCluster) -> None:
        self.cluster = cluster
        self._nodes: list[subprocess.Popen] = []

    def add(self, num_cpus: int = 1, limit_s: float = 240) -> None:
        """Start a node and wait until the head knows it; its processes are all in one session of their own."""
        before, cluster = living_nodes(self.cluster), self.cluster
        command = [
            str(BIN / "ray"), "start", "--block", f"--address={cluster.address}", "--node-ip-address=127.0.0.1",
            f"--num-cpus={num_cpus}", "--object-store-memory=100000000", "--include-log-monitor=false",
            f"--dashboard-agent-listen-port={port_for_ray()}", f"--dashboard-agent-grpc-port={port_for_ray()}",
            "--min-worker-port=0", "--max-worker-port=0", f"--temp-dir={cluster.session_dir}",
        ]  # fmt: skip
        env = {name: value for name, value in cluster.env.items() if name != "RAY_ADDRESS"}
        process = subprocess.Popen(
            command, env=env, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        self._nodes.append(process)
        deadline = time.monotonic() + limit_s
        while living_nodes(cluster) <= before:
            assert process.poll() is None, "the node ended"
            assert time.monotonic() < deadline, "the node did not come up"
            time.sleep(0.2)

    def lose(self) -> None:
        """The newest node, as if its power were cut."""
        process = self._nodes.pop()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def lose_all(self) -> None:
        while self._nodes:
            self.lose()


def living_nodes(cluster: RayCluster) -> int:
    """As the head's control store knows it; the dashboard is late."""
    nodes = GcsClient(address=cluster.address).get_all_node_info(timeout=60)
    return sum(node.state == GcsNodeInfo.ALIVE for node in nodes.values())


@contextmanager
def ray_nodes(number: int, **variables: str) -> Iterator[RayNodes]:
    """A head and so many nodes, which end with it."""
    nodes = RayNodes(start_cluster(num_cpus=0, **variables))
    try:
        for _ in range(number):
            nodes.add()
        yield nodes
    finally:
        nodes.lose_all()
        stop_cluster(nodes.cluster)

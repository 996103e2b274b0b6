"""A real Ray on this machine for a test session: its own ports and session folder, ended by pid without `ray stop`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.ranks import free_port

BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class RayCluster:
    """How a test's subprocess reaches the cluster."""

    env: dict[str, str]
    address: str
    dashboard: str
    session_dir: str

    def give_credentials(self, access_key: str, secret_key: str) -> None:
        """Let every node reach S3 as a role would: workers have the cluster's environment, not a driver's."""
        text = f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
        Path(self.env["AWS_SHARED_CREDENTIALS_FILE"]).write_text(text)

    def pids(self) -> list[int]:
        """Every living process of this cluster but the test session itself."""
        return [pid for pid in _process_ids() if pid != os.getpid() and self.session_dir in _traces(pid)]


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _traces(pid: int) -> str:
    """Arguments, environment and open files of a process; Ray's processes rename themselves over the first two."""
    folder, found = Path(f"/proc/{pid}"), []
    for name in ("cmdline", "environ"):
        with contextlib.suppress(OSError):
            found.append((folder / name).read_bytes().decode(errors="replace"))
    with contextlib.suppress(OSError):
        for link in (folder / "fd").iterdir():
            with contextlib.suppress(OSError):
                found.append(os.readlink(link))
    return "\n".join(found)


def end_orphans() -> None:
    """End clusters whose test session was killed before it could: their folders carry its pid in their names."""
    for folder in Path("/tmp").glob("rdz-*-*"):
        owner = folder.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            stop_cluster(RayCluster({}, "", "", str(folder)))


def start_cluster(
    num_cpus: int = 4, *, port: int | None = None, flags: Sequence[str] = (), **variables: str
) -> RayCluster:
    """Start a head, with these flags of `ray start` and variables of its environment, and wait until it answers."""
    end_orphans()
    session_dir = tempfile.mkdtemp(prefix=f"rdz-{os.getpid()}-", dir="/tmp")
    port, dashboard = port or port_for_ray(), port_for_ray()
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "disabled",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEDUP_LOGS": "0",
        "AWS_SHARED_CREDENTIALS_FILE": f"{session_dir}/aws-credentials",
        "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # Ray's 15 would starve workers on cores that tests share
        **variables,
    }
    env.pop("RAY_ADDRESS", None)
    command = [
        str(BIN / "ray"), "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}",
        "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}", f"--ray-client-server-port={port_for_ray()}",
        f"--dashboard-agent-listen-port={port_for_ray()}", f"--num-cpus={num_cpus}", "--object-store-memory=200000000",
        f"--temp-dir={session_dir}", *flags,
    ]  # fmt: skip
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    address = f"127.0.0.1:{port}"
    return RayCluster({**env, "RAY_ADDRESS": address}, address, f"http://127.0.0.1:{dashboard}", session_dir)


def port_for_ray() -> int:
    """A free port outside the range that Ray hands to its workers."""
    while 10000 < (port := free_port()) < 20000:
        pass
    return port


def stop_cluster(cluster: RayCluster) -> None:
    """End every process of the cluster and remove its folder."""
    deadline = time.monotonic() + 20
    while (pids := cluster.pids()) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(cluster.session_dir, ignore_errors=True)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[RayCluster]:
    """One head node for the whole session."""
    cluster = start_cluster()
    yield cluster
    stop_cluster(cluster)

"""Several hosts on this machine: network namespaces on one bridge, each with its own Ray node and folders.

Neighbours: `tests/fault/test_hosts.py` and `tests/bench/recovery.py`. Needs root and iproute2. Host 0 is the head,
without CPUs for workers; drivers run there. The bridge has an address, where an S3 server of the test can listen.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
_START_S, _TRIES = 240.0, 3
PATIENT = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "10000",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
}
"""Half a minute until a silent node is lost: a raylet on a busy core is late, not dead. Without a head Ray's processes
live on for a while: what ends a run's workers then must be the run's own."""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    index: int
    name: str
    ip: str
    cable: str
    folder: Path

    def pids(self) -> list[int]:
        """Every living process of this host."""
        done = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False)
        return [int(word) for word in done.stdout.split()]

    def pids_of(self, mark: str) -> list[int]:
        """Those whose command line has this word (`raylet`)."""
        found = []
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if mark in Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace"):
                    found.append(pid)
        return found

    def logs(self) -> str:
        """All that Ray's processes of this host have logged."""
        texts = [path.read_text(errors="replace") for path in sorted(self.folder.glob("session_2*/logs/worker*"))]
        return "\n".join(texts)


class Hosts:
    """A head and `num_hosts` others, each with `cpus` for workers; a context manager.

    Args:
        health: variables of Ray's nodes.

    Attributes:
        base: folder of all that belongs to the hosts.
        local: a path that is another folder on each host.
        bridge_ip: this test session's own address in their network.
    """

    def __init__(self, num_hosts: int = 3, cpus: int = 1, *, health: Mapping[str, str] = PATIENT) -> None:
        _end_orphans()
        pid = os.getpid()
        self.base = Path(f"/tmp/rdzh-{pid}")
        self.local = self.base / "local"
        self._bridge, self._cpus = f"rzb{pid}", cpus
        net = f"10.{64 + (pid >> 8) % 64}.{pid % 256}"
        self.bridge_ip = f"{net}.1"
        self.hosts = [
            Host(index, f"rdzh-{pid}-{index}", f"{net}.{10 + index}", f"rzv{pid}-{index}", self.base / str(index))
            for index in range(num_hosts + 1)
        ]
        self.address = f"{self.hosts[0].ip}:6379"
        self.env = {
            **{name: value for name, value in os.environ.items() if not name.startswith("AWS_")},
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "RAY_AUTH_MODE": "disabled",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_DEDUP_LOGS": "0",
            "AWS_SHARED_CREDENTIALS_FILE": str(self.base / "aws-credentials"),
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_DEFAULT_REGION": "us-east-1",
            "OMP_NUM_THREADS": "1",
            "RAY_worker_niceness": "0",
            "RAYDZ_TEST_MARKS": str(self.base),
            **health,
        }
        self.env.pop("RAY_ADDRESS", None)

    def __enter__(self) -> Hosts:
        try:
            self._build()
            self.start(self.hosts[0])
            self.start(*self.hosts[1:])
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def give_credentials(self, access_key: str, secret_key: str) -> None:
        """Let every host reach S3 as a role would."""
        text = f"[default]\naws_access_key_id = {access_key}\naws_secret_access_key = {secret_key}\n"
        Path(self.env["AWS_SHARED_CREDENTIALS_FILE"]).write_text(text)

    def run_on(self, host: Host, command: Sequence[str], **options) -> subprocess.Popen:
        """Start a process on a host; its `local` folder is the host's own."""
        script = f'mount --bind "{host.folder}/local" "{self.local}" && exec "$@"'
        env = {**self.env, **({"RAY_ADDRESS": self.address} if host.index == 0 else {}), **options.pop("env", {})}
        inside = ["ip", "netns", "exec", host.name, "sh", "-c", script, "host", *command]
        return subprocess.Popen(inside, env=env, **options)

    def host_of(self, pid: int) -> Host:
        """Where a living process runs."""
        done = subprocess.run(["ip", "netns", "identify", str(pid)], capture_output=True, text=True, check=True)
        [found] = [host for host in self.hosts if host.name == done.stdout.strip()]
        return found

    def start(self, *hosts: Host) -> None:
        """Start the hosts' Ray nodes, at once, and wait until they have joined.

        Ray gives a node half a minute, which cores with other work on them may not keep: then again, one by one.
        """
        left = self._not_started(hosts)
        for _ in range(_TRIES):
            for host in left:
                self.kill(host)
            left = [host for host in left if self._not_started([host])]
        if left:
            text = (left[0].folder / "start.log").read_text()[-3000:]
            raise RuntimeError(f"host {left[0].index} did not start:\n{text}")

    def _not_started(self, hosts: Sequence[Host]) -> list[Host]:
        with contextlib.ExitStack() as stack:
            starting = []
            for host in hosts:
                shutil.rmtree(host.folder, ignore_errors=True)
                (host.folder / "local").mkdir(parents=True)
                log = stack.enter_context((host.folder / "start.log").open("w"))
                starting.append(stack.enter_context(self.run_on(host, self._ray_start(host), stdout=log, stderr=log)))
            codes = [process.wait(timeout=_START_S) for process in starting]
        return [host for host, code in zip(hosts, codes, strict=True) if code]

    def _ray_start(self, host: Host) -> list[str]:
        shared = [f"--node-ip-address={host.ip}", "--object-store-memory=100000000", f"--temp-dir={host.folder}"]
        if host.index == 0:
            head = ["--head", "--port=6379", f"--dashboard-host={host.ip}", "--dashboard-port=8265", "--num-cpus=0"]
            return [str(BIN / "ray"), "start", *head, *shared]
        return [str(BIN / "ray"), "start", f"--address={self.address}", f"--num-cpus={self._cpus}", *shared]

    def kill(self, host: Host) -> None:
        """End all of a host's processes at once, as when its power is cut; the drivers with it if it is the head."""
        deadline = time.monotonic() + 20
        while (pids := host.pids()) and time.monotonic() < deadline:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)

    def cut(self, host: Host) -> None:
        """Pull a host's cable: nothing is refused, nothing arrives."""
        _ip("link", "set", host.cable, "down")

    def heal(self, host: Host) -> None:
        """Put the cable back."""
        _ip("link", "set", host.cable, "up")

    def alive(self) -> list[Host]:
        """The hosts that the head takes for alive, and not for about to go."""
        code = "import ray; ray.init(address='auto', logging_level='error'); "
        code += "go = ray._private.state.state.get_draining_nodes(); "
        code += "print(*[n['NodeManagerAddress'] for n in ray.nodes() if n['Alive'] and n['NodeID'] not in go])"
        process = self.run_on(
            self.hosts[0], [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        ips = process.communicate(timeout=120)[0].split()
        return [host for host in self.hosts if host.ip in ips]

    def mend(self) -> None:
        """All hosts as at the start, whatever a test did to them."""
        for host in self.hosts:
            self.heal(host)
        head = self.hosts[0]
        is_anew = not head.pids_of("gcs_server")
        if is_anew:
            self.kill(head)
            self.start(head)
        there = [head] if is_anew else self.alive()
        lost = [host for host in self.hosts[1:] if host not in there]
        for host in lost:
            self.kill(host)
        self.start(*lost)

    def stop(self) -> None:
        """End every process, take the network down and remove the folders."""
        for host in self.hosts:
            self.kill(host)
            _ip("link", "del", host.cable, check=False)  # else it stays until the kernel has taken the namespace down
            _ip("netns", "del", host.name, check=False)
            shutil.rmtree(f"/etc/netns/{host.name}", ignore_errors=True)
        _ip("link", "del", self._bridge, check=False)
        shutil.rmtree(self.base, ignore_errors=True)

    def _build(self) -> None:
        self.local.mkdir(parents=True)
        _ip("link", "add", self._bridge, "type", "bridge")
        _ip("addr", "add", f"{self.bridge_ip}/24", "dev", self._bridge)
        _ip("link", "set", self._bridge, "up")
        for host in self.hosts:
            _ip("netns", "add", host.name)
            _ip("link", "add", host.cable, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            _ip("link", "set", host.cable, "master", self._bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.ip}/24", "dev", "eth0")
            _ip("-n", host.name, "link", "set", "eth0", "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            names = Path(f"/etc/netns/{host.name}/hosts")  # gloo publishes what the host's name stands for
            names.parent.mkdir(parents=True, exist_ok=True)
            names.write_text(f"127.0.0.1 localhost\n{host.ip} {socket.gethostname()}\n")


def _ip(*arguments: str, check: bool = True) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()} (root and iproute2 are needed)")


def _end_orphans() -> None:
    """Take down what a test session left that was killed: its pid is in the names."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=False).stdout
    for name in [line.split()[0] for line in listed.splitlines() if line.startswith("rdzh-")]:
        owner = name.split("-")[1]
        if Path(f"/proc/{owner}").exists():
            continue
        pids = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False).stdout.split()
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        _ip("netns", "del", name, check=False)
        _ip("link", "del", f"rzb{owner}", check=False)
        shutil.rmtree(f"/etc/netns/{name}", ignore_errors=True)
        shutil.rmtree(f"/tmp/rdzh-{owner}", ignore_errors=True)

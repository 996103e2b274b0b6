"""Seconds from a fault to the next training step, by kind and phase, beside plain Ray Train with its defaults.

    python tests/bench/recovery.py                          # a table of all kinds
    python tests/bench/recovery.py --quick --json           # `kill` alone, within 4 minutes on two quiet cores
    python tests/bench/recovery.py --kinds host,cut --only raydz

Two workers on a cluster of four hosts in network namespaces (root and iproute2), one of them in reserve; a tiny model,
steps of 0.3 s, a checkpoint every 5. The fault comes between two checkpoints, after step 12. Kinds: `kill` SIGKILL of a
rank's process, `stop` SIGSTOP of it, `exception` raised once on one rank, `host` all processes of a rank's host killed,
`cut` its cable pulled. `recovery_s` is from the fault (of `exception`: from the last step before it) to the end of the
first step after it; of raydz also `detect_s` to the driver that knows, `start_s` to the worker's train function,
`load_s` to the loaded checkpoint, `first_step_s`. The cluster of raydz has the health checks that
`orchestrate/README.md` recommends, that of plain Ray Train has Ray's own.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

if __package__ in (None, ""):
    sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.support.hosts import Hosts
from tests.support.runs import REPOSITORY, read_lines, small_config, worker_pids

KINDS = ("kill", "stop", "exception", "host", "cut")
SYSTEMS = ("raydz", "ray_train")
FAULT_AFTER, STEPS = 12, 400
TUNED = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
STUMBLES_AT = 7
START_LIMIT_S = 600.0
PHASES = ("detect", "start", "load", "first_step")


class NotRecovered(Exception):
    """No step within the limit, or the driver gave up."""


@dataclass
class Contestant:
    """A run under way: how the bench sees its steps and its ranks."""

    folder: Path
    process: subprocess.Popen

    def last_step(self) -> int:
        """The newest step."""
        raise NotImplementedError

    def pids(self) -> list[int]:
        """Of the ranks' processes now, in rank order."""
        raise NotImplementedError

    def recovery(self, fault_at: float | None) -> dict[str, float] | None:
        """Metrics, once the first step after the fault is done; without a time, from the last step before it."""
        raise NotImplementedError

    def wait(self, condition: Callable[[], Any], limit_s: float) -> Any:
        """The condition, once it is true."""
        deadline = time.monotonic() + limit_s
        while not (found := condition()):
            if self.process.poll() is not None:
                raise NotRecovered(f"the driver ended with {self.process.returncode}")
            if time.monotonic() > deadline:
                raise NotRecovered(f"no step within {limit_s:g} s")
            time.sleep(0.05)
        return found


class Raydz(Contestant):
    """`raydz.fit`."""

    def last_step(self) -> int:
        return max((line["step"] for line in read_lines(self.folder / "run" / "journal.jsonl")), default=0)

    def pids(self) -> list[int]:
        return worker_pids(self.folder, "run")

    def recovery(self, fault_at: float | None) -> dict[str, float] | None:
        events = {event["event"]: event for event in read_lines(self.folder / "run" / "events.jsonl")}
        if "recovered" not in events:
            return None
        recovered, seen_at = events["recovered"], events["failure"]["seen_at"]
        seconds = recovered["recovery_s"]
        later = {f"{name}_s": seconds[name] for name in PHASES[1:]}
        if fault_at is None:
            return {"recovery_s": seconds["total"], "detect_s": seconds["detect"], **later}
        return {"recovery_s": recovered["time"] - fault_at, "detect_s": seen_at - fault_at, **later}


class RayTrain(Contestant):
    """`plain_ray_train.py`."""

    def last_step(self) -> int:
        return max((line["step"] for line in read_lines(self.folder / "steps.jsonl")), default=0)

    def pids(self) -> list[int]:
        newest = {line["rank"]: line["pid"] for line in read_lines(self.folder / "ranks.jsonl")}
        return [pid for _, pid in sorted(newest.items())]

    def recovery(self, fault_at: float | None) -> dict[str, float] | None:
        began = [line["time"] for line in read_lines(self.folder / "ranks.jsonl")][2:]
        steps = [line["time"] for line in read_lines(self.folder / "steps.jsonl")]
        after = [at for at in steps if began and at > min(began)]
        if not after:
            return None
        since = fault_at if fault_at is not None else max(at for at in steps if at < min(began))
        return {"recovery_s": after[0] - since, "detect_and_start_s": min(began) - since}


def start(system: str, hosts: Hosts, folder: Path, kind: str) -> Contestant:
    """A driver on the head."""
    if system == "raydz":
        sections = {"train": {"steps": STEPS, "eval_every": 0}}
        options = folder / "options.json"
        loss = "stumbling_loss" if kind == "exception" else "slow_loss"
        given = {"config": small_config(folder, "run", **sections), "loss": loss, "result": str(folder / "result.json")}
        options.write_text(json.dumps(given))
        return Raydz(folder, _driver(hosts, folder, ["tests.support.fit_driver", str(options)]))
    fails_at = STUMBLES_AT if kind == "exception" else 0
    arguments = [str(folder), str(STEPS), str(fails_at)]
    return RayTrain(folder, _driver(hosts, folder, ["tests.bench.plain_ray_train", *arguments]))


def _driver(hosts: Hosts, folder: Path, command: list[str]) -> subprocess.Popen:
    with (folder / "driver.log").open("w") as output:
        return hosts.run_on(
            hosts.hosts[0], [sys.executable, "-m", *command], env={"PYTHONPATH": str(REPOSITORY)}, cwd=REPOSITORY,
            stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def strike(hosts: Hosts, victim: int, kind: str) -> float:
    """The fault; when it was."""
    host, at = hosts.host_of(victim), time.time()
    if kind in ("kill", "stop"):
        os.kill(victim, signal.SIGKILL if kind == "kill" else signal.SIGSTOP)
    elif kind == "host":
        hosts.kill(host)
    else:
        hosts.cut(host)
    return at


def measure(system: str, hosts: Hosts, kind: str, limit_s: float) -> dict[str, float]:
    """Metrics of one recovery.

    Raises:
        NotRecovered: there was none.
    """
    with tempfile.TemporaryDirectory(prefix="raydz-recovery-") as where:
        run = start(system, hosts, Path(where), kind)
        try:
            fault_at = None
            if kind != "exception":
                run.wait(lambda: run.last_step() >= FAULT_AFTER, START_LIMIT_S)
                fault_at = strike(hosts, run.pids()[1], kind)
            metrics = run.wait(lambda: run.recovery(fault_at), limit_s if fault_at else START_LIMIT_S)
            return {name: round(seconds, 2) for name, seconds in metrics.items()}
        except NotRecovered as error:
            tail = (Path(where) / "driver.log").read_text(errors="replace")[-2000:]
            print(f"{system} {kind}: {error}\n{tail}", file=sys.stderr)
            raise
        finally:
            run.process.kill()
            run.process.wait()
            hosts.mend()


def run_system(system: str, kinds: list[str], limit_s: float, tell: Callable[[dict[str, Any]], None]) -> None:
    """All kinds on a cluster of its own."""
    with Hosts(3, 1, health=TUNED if system == "raydz" else {}) as hosts:
        for kind in kinds:
            metrics: dict[str, float] = {}
            note = ""
            try:
                metrics = measure(system, hosts, kind, limit_s)
            except NotRecovered as error:
                note = str(error)
            tell({
                "bench": "recovery", "system": system, "variant": kind, "device": "cpu", "ranks": 2,
                "metrics": metrics, "note": note,
            })  # fmt: skip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", default=",".join(KINDS), help="which faults, separated by commas")
    parser.add_argument("--only", default=",".join(SYSTEMS), help="which systems, separated by commas")
    parser.add_argument("--quick", action="store_true", help="`kill` alone")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds that a recovery may take")
    parser.add_argument("--json", action="store_true", help="one line of JSON a result")
    options = parser.parse_args()
    kinds = ["kill"] if options.quick else [kind for kind in KINDS if kind in options.kinds.split(",")]

    def tell(result: dict[str, Any]) -> None:
        if options.json:
            print(json.dumps(result), flush=True)
            return
        seconds = "  ".join(f"{name[:-2]} {value:.1f}" for name, value in result["metrics"].items())
        print(f"{result['system']:10} {result['variant']:10} {seconds}{result['note']}", flush=True)

    for system in SYSTEMS:
        if system in options.only.split(","):
            run_system(system, kinds, options.limit, tell)
    if not options.json:
        print("load", Path("/proc/loadavg").read_text().strip())


if __name__ == "__main__":
    main()

"""Saving and loading of the same state: raydz beside torch DCP and DeepSpeed, on this disk and on a real S3 server.

    python tests/bench/checkpoint.py                      # a table
    python tests/bench/checkpoint.py --json --ranks 2     # one JSON line a result
    python tests/bench/checkpoint.py --quick --only raydz-sync,dcp-sync --store file

Every contestant runs in processes of its own, one after the other: saves and loads, then loads by another number of
ranks. State: a decoder's fp32 weights and AdamW's two moments. S3 is SeaweedFS on this machine, which shares its
cores; DCP reaches it through s3torchconnector, which for its DCP part also needs tenacity and does not bring it along
(pip install s3torchconnector tenacity). The floor rows move the same bytes a rank: a copy in memory, a write
with fsync, boto3's own upload and download. `requests` are counted by the S3 server: of a save and a load, in rows of
asynchronous saves of a save alone. `step+` is what the call and the step after it take beyond an idle step.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import floor  # noqa: E402 - the folder of this file is no package
from step import SIZES  # noqa: E402

from tests.support.seaweed import SeaweedServer  # noqa: E402

KINDS = ("floor", "raydz-sync", "raydz-async", "dcp-sync", "dcp-async", "deepspeed-sync")
ADAMW_BYTES = 12  # a parameter: weight, two moments


class MeteredServer(SeaweedServer):
    """Counts its requests."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.metrics_port = probe.getsockname()[1]
        super().__init__()

    def _arguments(self) -> list[str]:
        return [*super()._arguments(), f"-metricsPort={self.metrics_port}"]

    def requests(self) -> int:
        """Answered so far, refused ones too."""
        text = urllib.request.urlopen(f"http://127.0.0.1:{self.metrics_port}/metrics").read().decode()
        lines = [line for line in text.splitlines() if line.startswith("SeaweedFS_s3_request_total{")]
        return int(sum(float(line.rsplit(" ", 1)[1]) for line in lines))


def run_ranks(system: str, phase: str, path: str, options: argparse.Namespace, ranks: int, env: dict) -> dict:
    """One phase of a contestant in fresh processes."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks),
        str(Path(__file__).with_name("checkpoint_contestants.py")), "--system", system, "--phase", phase,
        "--path", path, "--size", options.size, "--device", options.device, "--rounds", str(options.rounds),
        "--saved-ranks", str(options.ranks),
    ]  # fmt: skip
    environment = {**os.environ, **env, "OMP_NUM_THREADS": "1", "DS_SKIP_CUDA_CHECK": "1", "PYTHONWARNINGS": "ignore"}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=options.limit_s)
    except subprocess.TimeoutExpired:
        return {"note": f"no end within {options.limit_s:g} s"}
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        errors = [line for line in done.stderr.splitlines() if "Error" in line]
        return {"note": "failed: " + (errors or ["no output"])[0].strip()}
    return json.loads(lines[0])


def run_contestant(kind: str, path: str, options: argparse.Namespace, server: MeteredServer | None) -> dict:
    """Save, load alike, load resharded; throughputs of the whole state."""
    system, _, mode = kind.partition("-")
    env = {} if server is None else {**server.env, "AWS_ENDPOINT_URL": server.endpoint_url}
    before = server.requests() if server else 0
    result = run_ranks(system, mode, path, options, options.ranks, env)
    metrics = result.get("metrics")
    if metrics is None:
        return result
    if server:  # of a save, or of a save and a load
        metrics["requests"] = (server.requests() - before) / (options.rounds + 1 + (mode == "async"))
    total = state_bytes(options.size)
    metrics |= {"state_bytes": total, "save_bytes_per_s": total / metrics["total_s"]}
    metrics["cpu_s_per_gb"] = metrics["cpu_s"] / (total / 1e9)
    if mode != "sync":
        return result
    metrics["load_bytes_per_s"] = total / metrics["load_s"]
    resharded = run_ranks(system, "load", path, options, options.other_ranks, env)
    if "metrics" in resharded:
        metrics |= {key.replace("load", "reshard", 1): value for key, value in resharded["metrics"].items()}
        metrics["reshard_bytes_per_s"] = total / metrics["reshard_s"]
    else:
        result["note"] = f"resharded: {resharded['note']}"
    return result


def state_bytes(size: str) -> int:
    from step import build_decoder

    model = build_decoder(size, True, None)
    return ADAMW_BYTES * sum(parameter.numel() for parameter in model.parameters())


def contest(options: argparse.Namespace) -> Iterator[tuple[str, str, dict]]:
    """(store, kind, result) in turn."""
    kinds = [kind for kind in KINDS if not options.only or kind in options.only.split(",")]
    for store in options.store.split(","):
        with contextlib.ExitStack() as stack:
            folder = tempfile.mkdtemp(prefix="raydz-bench-", dir=options.dir)
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            server = None
            if store == "s3":
                server = MeteredServer()
                stack.callback(server.stop)
            for kind in kinds:
                path = f"s3://{server.bucket()}/{kind}" if server else f"{folder}/{kind}"
                if kind == "floor":
                    num_bytes = state_bytes(options.size) // options.ranks
                    yield from ((store, *row) for row in floor.rows(path, num_bytes, options, server))
                    continue
                yield store, kind, run_contestant(kind, path, options, server)
                if server is None:
                    shutil.rmtree(path, ignore_errors=True)


def print_row(store: str, kind: str, result: dict) -> None:
    m = result.get("metrics", {})

    def shown(name: str, scale: float = 1.0) -> str:
        return f"{m[name] * scale:9.3f}" if name in m else f"{'-':>9}"

    cells = [shown("blocking_s"), shown("first_step_excess_s"), shown("total_s"), shown("save_bytes_per_s", 1e-9),
             shown("cpu_s_per_gb"), shown("requests"), shown("load_bytes_per_s", 1e-9),
             shown("reshard_bytes_per_s", 1e-9)]  # fmt: skip
    print(f"{store:5} {kind:15} {' '.join(cells)}  {result['note']}", flush=True)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--other-ranks", type=int, help="ranks of the resharded load (default: half of --ranks)")
    parser.add_argument("--only", help=f"some of {','.join(KINDS)}")
    parser.add_argument("--store", default="file,s3", help="file, s3, or both")
    parser.add_argument("--dir", help="where files are saved (default: the temporary folder)")
    parser.add_argument("--size", choices=SIZES, default="125m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit-s", type=float, default=400)
    parser.add_argument("--quick", action="store_true", help="the 20m model, one round, files alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.size, options.rounds, options.store = "20m", 1, "file"
    options.other_ranks = options.other_ranks or max(1, options.ranks // 2)
    return options


def main() -> None:
    options = parse()
    if not options.json:
        heads = ("blocking", "step+", "total s", "GB/s", "cpu s/GB", "requests", "load GB/s", "resharded")
        print(f"{state_bytes(options.size) / 1e9:.2f} GB of state, {options.ranks} ranks, {options.device}")
        print(f"{'':21} {' '.join(f'{head:>9}' for head in heads)}")
    for store, kind, result in contest(options):
        if not options.json:
            print_row(store, kind, result)
            continue
        system, _, variant = kind.partition("-")
        row = {"bench": "checkpoint", "system": system, "variant": f"{store}, {variant}", **result}
        print(json.dumps({**row, "device": options.device, "ranks": options.ranks}), flush=True)


if __name__ == "__main__":
    main()

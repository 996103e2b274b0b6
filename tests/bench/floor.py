"""What this machine gives for the bytes of one rank, nothing around it: memory, disk, and boto3's own transfers.

Neighbours: `checkpoint.py` prints these rows beside its contestants. One process per rank, all at once.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Move = Callable[[], None]


def memcpy(path: str, data: np.ndarray) -> tuple[Move, Move | None]:
    out = np.ones_like(data)
    return lambda: np.copyto(out, data), None


def write(path: str, data: np.ndarray) -> tuple[Move, Move | None]:
    """A file written in 16 MiB pieces, synced and closed; read back from the page cache into memory that is there."""
    out = np.ones_like(data)

    def save() -> None:
        with open(path, "wb", buffering=0) as file:
            for start in range(0, len(data), 16 << 20):
                file.write(data[start : start + (16 << 20)].data)
            os.fsync(file.fileno())

    def load() -> None:
        with open(path, "rb", buffering=0) as file:
            for start in range(0, len(out), 16 << 20):
                file.readinto(out[start : start + (16 << 20)].data)

    return save, load


def boto3_transfer(path: str, data: np.ndarray) -> tuple[Move, Move | None]:
    """`upload_fileobj` and `download_fileobj` as they come: 8 MiB parts, ten threads."""
    import boto3

    client = boto3.client("s3", region_name="us-east-1", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
    bucket, _, key = path.removeprefix("s3://").partition("/")

    def save() -> None:
        client.upload_fileobj(io.BytesIO(data.data), bucket, key)

    def load() -> None:
        client.download_fileobj(bucket, key, io.BytesIO())

    return save, load


def _rank(make: Callable, path: str, num_bytes: int, rounds: int, env: dict[str, str], barrier: Any, out: Any) -> None:
    os.environ |= env
    data = np.random.default_rng(0).integers(0, 256, num_bytes, np.uint8)
    save, load = make(path, data)
    times: dict[str, list[tuple[float, float]]] = {}
    for name, move in (("save", save), ("load", load)):
        for index in range(rounds + 1) if move else ():
            barrier.wait()
            used, started = time.process_time(), time.perf_counter()
            move()
            barrier.wait()
            if index:
                times.setdefault(name, []).append((time.perf_counter() - started, time.process_time() - used))
    out.put({name: [statistics.median(column) for column in zip(*rows, strict=True)] for name, rows in times.items()})


def rows(path: str, num_bytes: int, options: argparse.Namespace, server: Any) -> Iterator[tuple[str, dict]]:
    """(kind, result) of each floor of a store."""
    makers = [boto3_transfer] if server else [memcpy, write]
    env = {**server.env, "AWS_ENDPOINT_URL": server.endpoint_url} if server else {}
    context = multiprocessing.get_context("spawn")
    for make in makers:
        before = server.requests() if server else 0
        barrier, out = context.Barrier(options.ranks), context.Queue()
        os.makedirs(path, exist_ok=True) if not server else None
        ranks = [
            context.Process(target=_rank, args=(make, f"{path}/{r}", num_bytes, options.rounds, env, barrier, out))
            for r in range(options.ranks)
        ]
        for rank in ranks:
            rank.start()
        found = [out.get() for _ in ranks]
        for rank in ranks:
            rank.join()
        total = num_bytes * options.ranks
        metrics = {"state_bytes": total, "total_s": found[0]["save"][0]}
        metrics["save_bytes_per_s"] = total / metrics["total_s"]
        metrics["cpu_s_per_gb"] = sum(rank["save"][1] for rank in found) / (total / 1e9)
        if "load" in found[0]:
            metrics |= {"load_s": found[0]["load"][0], "load_bytes_per_s": total / found[0]["load"][0]}
            metrics["load_cpu_s_per_gb"] = sum(rank["load"][1] for rank in found) / (total / 1e9)
        if server:
            metrics["requests"] = (server.requests() - before) / (options.rounds + 1)
        yield f"floor-{make.__name__}", {"metrics": metrics, "note": ""}

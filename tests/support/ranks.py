"""Run a function on N gloo ranks: real processes that are started once for a test session and reused.

`ranks(world_size)` gives a pool; `pool.run(function, *args)` calls `function(rank, world_size, *args)` on every rank
inside an initialised default process group and returns the results in rank order. An exception on any rank, or a time
limit, fails the test with all ranks' tracebacks, and the pool is thrown away.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

_REPOSITORY = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


class RankFailure(AssertionError):
    """One or more ranks raised, died, or did not answer in time."""


def free_port() -> int:
    """A TCP port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _serve(rank: int, world_size: int, port: int, pipe: Connection) -> None:
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo",
    )  # fmt: skip
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    while True:
        task = pipe.recv()
        if task is None:
            break
        function, args = task
        try:
            pipe.send((True, function(rank, world_size, *args)))
        except BaseException as error:
            text = traceback.format_exc()
            pipe.send((False, (type(error).__name__, text)))
            if dist.is_initialized():
                dist.destroy_process_group()  # wakes ranks that wait for this one
            break
    os._exit(0)


class RankPool:
    """N processes that wait for functions to run."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        port = free_port()
        os.environ["PYTHONPATH"] = _REPOSITORY
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self.world_size, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable, *args: Any, limit_s: float = 120.0) -> list[Any]:
        """Results of `function(rank, world_size, *args)` in rank order.

        Raises:
            RankFailure: with the tracebacks of the ranks that failed first.
        """
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send((function, args))
        deadline = time.monotonic() + limit_s
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        while len(results) + len(failures) < self.world_size:
            open_pipes = {self._pipes[r]: r for r in range(self.world_size) if r not in results and r not in failures}
            ready = wait(list(open_pipes), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                failures.update({rank: f"no answer within {limit_s} s" for rank in open_pipes.values()})
                break
            for pipe in ready:
                rank = open_pipes[pipe]
                try:
                    fine, value = pipe.recv()
                except EOFError:
                    fine, value = False, ("", "the process died")
                if fine:
                    results[rank] = value
                else:
                    failures[rank] = value[1]
                    deadline = min(deadline, time.monotonic() + 20.0)
        if failures:
            self.stop()
            raise RankFailure("\n".join(f"--- rank {rank}\n{text}" for rank, text in failures.items()))
        return [results[rank] for rank in range(self.world_size)]

    def stop(self) -> None:
        """End the processes; the next `run` starts new ones."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._pipes.clear()
        self._processes.clear()


_POOLS: dict[int, RankPool] = {}


@pytest.fixture(scope="session")
def ranks():
    """Give `ranks(world_size) -> RankPool`; all pools end with the session."""

    def pool(world_size: int) -> RankPool:
        return _POOLS.setdefault(world_size, RankPool(world_size))

    yield pool
    for started in _POOLS.values():
        started.stop()
    _POOLS.clear()

"""What a rank's process does where its worker only supervises: join the round's processes, train, say how it went.

Neighbours: `zygote.py` forks into `run`; `supervisor.py` is at the other end of the connection and passes everything
on to the board. Messages are (name, arguments); nothing here talks to Ray.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from ray import cloudpickle

from raydz import log
from raydz.checkpoint.memory import MemorySnapshots
from raydz.dist import World, init_world
from raydz.dist.collectives import PeerLost
from raydz.dist.monitor import print_and_exit, set_end
from raydz.dist.setup import choose_device, shutdown_world
from raydz.errors import RaydzError, TrainingError
from raydz.orchestrate.beats import Beats
from raydz.orchestrate.place import Seat
from raydz.orchestrate.rounds import Order, Report
from raydz.orchestrate.worker import WorkerTask, torch_threads
from raydz.storage.memory_slot import MemorySlot
from raydz.train import run_training
from raydz.train.attempt import Attempt
from raydz.train.recovery import Interruption

_STORE_S = 300.0
_STEPS_UNTIL_IMPORTED = 3
"""By then a run has imported whatever it needs, all but what a rare event asks for."""


def unpack(packed: bytes) -> WorkerTask:
    """The task, with whatever modules people's functions need."""
    return cloudpickle.loads(packed)


class Supervisor:
    """The other end of the connection, as the child sees it.

    Attributes:
        stop_reason: why this rank is to end the run, or None.
        leaves: set when the process may end: all ranks are done.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()
        self.seat: Seat
        self.order: Order
        self.seat, self.order = connection.recv()
        self.stop_reason: str | None = None
        self.leaves = threading.Event()
        self._met = threading.Event()
        self._store: tuple[str, int] = ("", 0)
        threading.Thread(target=self._listen, name="raydz-supervisor", daemon=True).start()

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a message, from any thread."""
        with self._lock:
            self._connection.send((name, arguments))

    def meeting_point(self) -> tuple[str, int]:
        """Where rank 0 waits. Blocking: until it does.

        Raises:
            TrainingError: it does not.
        """
        if not self._met.wait(_STORE_S):
            raise TrainingError("rank 0 opened no store for this round", got=f"nothing within {_STORE_S:g} s")
        return self._store

    def _listen(self) -> None:
        while True:
            try:
                name, argument = self._connection.recv()
            except (EOFError, OSError):  # it has gone, and this process must not outlive it
                os._exit(1)
            if name == "store":
                self._store = argument
                self._met.set()
            elif name == "stop":
                self.stop_reason = argument
            else:
                self.leaves.set()


def run(connection: Connection, task: WorkerTask) -> int:
    """Be a rank of this round; the exit code."""
    entered_at = time.time()
    supervisor = Supervisor(connection)
    seat, order, config = supervisor.seat, supervisor.order, task.config
    if order.number:
        task = replace(
            task, number=order.failures, skips=order.skips, before_step=order.before_step,
            interruption=_interruption(order),
        )  # fmt: skip
    log.setup(seat.place.rank, as_json=config.tracking.log_json)
    set_end(lambda error: _tell_and_exit(supervisor, error))
    try:
        world = _join(supervisor, task)
        with Beats(
            lambda *beats: supervisor.tell("post_beats", *beats), seat.place, f"{task.token}-{order.number}",
            seat.node_id,
        ) as beats:  # fmt: skip
            attempt = _attempt(supervisor, task, beats, entered_at)
            attempt = replace(attempt, memory=_memory(supervisor, world, task.number))
            result = run_training(config, world, model=task.model, loss=task.loss, attempt=attempt)
        if seat.place.rank == 0:
            supervisor.tell("post_result", asdict(result))
        supervisor.tell("done")
        supervisor.leaves.wait()  # rank 0's store serves the others until they are done
        shutdown_world()
        return 0
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        supervisor.tell("report", _report(seat.place.rank, error))
        return 1


def _join(supervisor: Supervisor, task: WorkerTask) -> World:
    """Form the process group of this round; the environment is what torchrun would have set.

    Raises:
        PeerLost: another rank's process ended meanwhile.
    """
    place, config = supervisor.seat.place, task.config
    os.environ |= {
        "RANK": str(place.rank), "WORLD_SIZE": str(place.world_size),
        "LOCAL_RANK": str(place.local_rank), "LOCAL_WORLD_SIZE": str(place.local_world_size),
    }  # fmt: skip
    if place.world_size > 1:
        device = choose_device(config.train.device, place.local_rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        timeout = timedelta(seconds=config.parallel.collective_timeout_s)
        try:
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo", store=_meet(supervisor, timeout), rank=place.rank,
                world_size=place.world_size, timeout=timeout,
            )  # fmt: skip
        except RuntimeError as error:
            raise PeerLost("the ranks of this round did not come together", got=str(error).strip()) from error
    return init_world(
        config.train.device, timeout_s=config.parallel.collective_timeout_s, threads=torch_threads(config)
    )


def _meet(supervisor: Supervisor, timeout: timedelta) -> dist.TCPStore:
    """Rank 0 holds the store, on a port that the system chooses; the others hear of it through the board."""
    seat = supervisor.seat
    if seat.place.rank == 0:
        store = dist.TCPStore(seat.host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
        supervisor.tell("announce_store", seat.host, store.port)
        return store
    host, port = supervisor.meeting_point()
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def _attempt(supervisor: Supervisor, task: WorkerTask, beats: Beats, entered_at: float) -> Attempt:
    """What the loop is told of this attempt; rank 0 tells how far it is."""
    tells = supervisor.seat.place.rank == 0

    def tell(name: str, *arguments: Any) -> None:
        if tells:
            supervisor.tell(name, *arguments)

    told: list[int] = []

    def ended_step(step: int) -> None:
        beats.step = step
        tell("post_step", step)
        if len(told) < _STEPS_UNTIL_IMPORTED:
            told.append(step)
            if len(told) == _STEPS_UNTIL_IMPORTED:
                supervisor.tell("modules", list(sys.modules))

    return Attempt(
        task.number, task.skips, task.before_step,
        lambda step: tell("post_chose", step), lambda step: tell("post_began", step), ended_step,
        lambda: supervisor.stop_reason,
        measured=lambda step, metrics: tell("measured", step, dict(metrics)),
        interruption=task.interruption, entered_at=entered_at,
    )  # fmt: skip


def _memory(supervisor: Supervisor, world: World, start: int) -> MemorySnapshots | None:
    fds = supervisor.seat.memory
    slots = [MemorySlot(fd) for fd in fds]
    tell = partial(supervisor.tell, "snapshot")
    if not slots:
        return None
    return MemorySnapshots(slots, world.rank, world.world_size, world.device, start=start, committed=tell)


def _interruption(order: Order) -> Interruption | None:
    if order.interruption is None:
        return None
    return Interruption(**{**order.interruption, "failures": tuple(order.interruption["failures"])})


def _tell_and_exit(supervisor: Supervisor, error: TrainingError) -> None:
    """End of a rank whose main thread waits for peers that will never come."""
    supervisor.tell("report", _report(supervisor.seat.place.rank, error))
    print_and_exit(error)


def _report(rank: int, error: BaseException) -> Report:
    is_typed = isinstance(error, RaydzError)
    lines = str(error).strip().splitlines()
    cause = error.what if isinstance(error, RaydzError) else f"{type(error).__name__}: {lines[-1] if lines else ''}"
    packed = _pack(error) if isinstance(error, RaydzError) else None
    return Report(rank, "raised", f"rank {rank}: {cause}" if not is_typed else cause, packed, is_echo=_is_echo(error))


def _is_echo(error: BaseException) -> bool:
    """Whether this is what a rank raises when another one has gone."""
    return isinstance(error, PeerLost)


def _pack(error: RaydzError) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:  # a class of people's own that cannot travel: its words can
        return pickle.dumps(TrainingError(f"{type(error).__name__}: {error.what}"))

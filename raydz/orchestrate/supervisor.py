"""What a Ray Train worker does with `failure.in_place`: it runs its rank in a process of its own and replaces that.

Neighbours: `attempts.py` hands `supervise` to Ray Train; `zygote.py` forks the rank's processes, `child.py` is what
they do; the board says which round it is. Imports no torch, so that a group starts as fast as without. See README.md,
"In place".
"""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import ray
import ray.train
from ray.train.backend import Backend, BackendConfig

from raydz import log
from raydz.config.cluster import FailureConfig
from raydz.errors import PlacementError, TrainingError
from raydz.orchestrate.board import View
from raydz.orchestrate.copies import Copies
from raydz.orchestrate.gauges import Gauges
from raydz.orchestrate.host_watch import watching
from raydz.orchestrate.place import Place, Seat
from raydz.orchestrate.rounds import Report
from raydz.orchestrate.stop import StopWatch
from raydz.orchestrate.vault import NUM_SLOTS
from raydz.orchestrate.zygote import Zygote
from raydz.storage.memory_slot import new_memory

_LEAVE_S = 30.0
_VAULTS_S = 30.0
_logger = log.get(__name__)


@dataclass(frozen=True)
class SupervisorTask:
    """What a supervisor is told; travels to it by Ray's serialiser.

    Args:
        packed: the `WorkerTask`, by Ray's serialiser: only the rank's processes open it.
        number: of the run's starts before.
    """

    board: Any
    run: str
    as_json: bool
    packed: bytes
    failure: FailureConfig
    number: int = 0


class _SharedDevices(Backend):
    """Every worker sees the GPUs of all workers of its node, as torch's backend of Ray Train does it."""

    share_cuda_visible_devices = True


class SupervisedBackend(BackendConfig):
    """Ray Train places the workers and nothing more: process groups belong to the ranks' own processes."""

    @property
    def backend_cls(self) -> type[Backend]:
        return _SharedDevices


def supervise(settings: dict[str, Any]) -> None:
    """Run this worker's rank, round after round, until all ranks are done.

    Raises:
        TrainingError: the driver gave the attempt up. PlacementError: processes cannot be started here.
    """
    task: SupervisorTask = settings["task"]
    context = ray.train.get_context()
    place = Place(
        context.get_world_rank(), context.get_world_size(), context.get_local_rank(), context.get_local_world_size()
    )
    log.setup(place.rank, as_json=task.as_json)
    num_slots = NUM_SLOTS if task.failure.memory_snapshot_every else 0
    memory = tuple(new_memory(f"raydz-rank-{place.rank}") for _ in range(num_slots))
    seat = Seat(place, ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address(), memory)
    with (
        watching(task.board, place, task.failure),
        _Views(task.board, place.rank) as views,
        StopWatch(task.board, looks=place.rank == 0) as stop,
        Zygote(task.packed, keep=memory) as zygote,
    ):
        _Supervisor(task, seat, zygote, views, stop).run()


class _Views:
    """A thread that hears of every new view of the board, and answers roll calls; readable when there is one."""

    def __init__(self, board: Any, rank: int) -> None:
        self._board, self._rank, self.view = board, rank, View()
        self.lost: Exception | None = None
        self._woken, self._wake = os.pipe()
        os.set_blocking(self._woken, False)
        self._thread = threading.Thread(target=self._listen, name="raydz-views", daemon=True)

    def __enter__(self) -> _Views:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """The thread may wait for the board for another while; it is the process's last."""

    def fileno(self) -> int:
        return self._woken

    def take(self) -> View:
        """The newest view.

        Raises:
            PlacementError: the board has gone, and the driver with it.
        """
        with suppress(BlockingIOError):
            os.read(self._woken, 1 << 12)
        if self.lost is not None:
            raise PlacementError(
                "the board does not answer: its driver has ended, or this host is cut off from it",
                where="a worker of this host", got=type(self.lost).__name__, wanted="an answer of the driver's actor",
                remedy="start the same command again: it goes on from the newest checkpoint",
            ) from self.lost  # fmt: skip
        return self.view

    def _listen(self) -> None:
        while self.lost is None and self.view.end is None:
            try:
                view = ray.get(self._board.next_view.remote(self.view.version))
            except Exception as error:  # the main thread raises it
                self.lost = error
            else:
                if view.version == self.view.version:
                    continue
                if view.roll != self.view.roll:
                    self._board.answer_roll.remote(self._rank, view.roll)
                self.view = view
            os.write(self._wake, b"x")


class _Supervisor:
    """One worker's rounds, in its main thread."""

    def __init__(self, task: SupervisorTask, seat: Seat, zygote: Zygote, views: _Views, stop: StopWatch) -> None:
        self._task, self._seat, self._zygote, self._views, self._stop = task, seat, zygote, views, stop
        self._view = View()
        self._child: Connection | None = None
        self._has_met = self._has_reported = self._was_stopped = False
        self._kills_before = 0
        self._gauges = Gauges(task.run) if seat.place.rank == 0 else None
        self._copies = Copies(seat)

    @property
    def _round(self) -> int:
        return self._view.order.number

    def run(self) -> None:
        """Until all ranks are done. Raises: see `supervise`."""
        place = self._seat.place
        self._task.board.join.remote(place.rank, self._seat.node_id)
        if self._seat.memory and self._task.number:
            self._await_vaults()  # an attempt before may have left snapshots
        self._begin()
        while True:
            views, zygote, child = self._views.fileno(), self._zygote.fileno(), self._child
            ready = wait([views, zygote] if child is None else [views, zygote, child], timeout=0.5)
            if child in ready:
                self._hear()
            if zygote in ready and (status := self._zygote.hear()) is not None:
                self._ended(status)
            if views in ready and self._follow(self._views.take()):
                return
            self._pass_stop_on()

    def _await_vaults(self) -> None:
        """Until the driver has said where snapshots are, within reason."""
        deadline = time.monotonic() + _VAULTS_S
        while self._view.vaults is None and self._view.end is None and time.monotonic() < deadline:
            if wait([self._views.fileno()], timeout=1.0):
                self._look_for_vaults(self._views.take())

    def _look_for_vaults(self, view: View) -> None:
        is_new = view.vaults is not None and view.vaults != self._copies.vaults
        self._view = view
        if is_new and view.vaults is not None:
            self._copies.vaults = view.vaults
            self._copies.fetch_if_lost()
            self._copies.hold()

    def _begin(self) -> None:
        """Start the round's process."""
        self._copies.fetch_if_lost()
        self._kills_before = memory_kills()
        self._has_met = self._has_reported = self._was_stopped = False
        self._child = self._zygote.fork()
        self._send((self._seat, self._view.order))
        if self._round:
            _logger.info("round %d: rank %d is process %s", self._round, self._seat.place.rank, self._zygote.pid)
        self._pass_store_on()

    def _follow(self, view: View) -> bool:
        """Do what a new view asks for; whether it was the last one.

        Raises:
            TrainingError: the driver gave the attempt up.
        """
        is_new_round = view.order.number != self._round
        self._look_for_vaults(view)
        if view.end == "given up":
            self._zygote.end_child()
            raise TrainingError("the attempt was ended by the driver", got=view.reason)
        if view.end == "finished":
            self._leave()
            return True
        if is_new_round:
            self._zygote.end_child()  # it may stand in a collective that nobody ends: there is nothing to ask it
            self._begin()
        self._pass_store_on()
        return False

    def _leave(self) -> None:
        """All ranks are done: let the process end by itself, within reason."""
        self._send(("leave", None))
        while self._zygote.pid is not None and wait([self._zygote.fileno()], timeout=_LEAVE_S):
            self._zygote.hear()

    def _hear(self) -> None:
        """Pass on what the child says: first of all how it ended."""
        assert self._child is not None
        try:
            name, arguments = self._child.recv()
        except (EOFError, OSError):
            self._child = None
            return
        board, number = self._task.board, self._round
        if name == "report":
            self._report(arguments[0])
        elif name == "done":
            board.done.remote(number, self._seat.place.rank, self._seat.place.world_size)
        elif name == "announce_store":
            board.announce_store.remote(number, *arguments)
        elif name == "snapshot":
            self._copies.send(*arguments)
        elif name == "modules":
            self._zygote.load(*arguments)
        elif name == "measured":
            if self._gauges is not None:
                self._gauges(*arguments)
        else:
            board.relay.remote(number, name, *arguments)

    def _ended(self, status: int) -> None:
        """The child is gone: hear its last words, or say how it was ended."""
        while self._child is not None and self._child.poll():
            self._hear()
        self._child = None
        self._report(report_of(self._seat.place.rank, status, memory_kills() - self._kills_before))

    def _report(self, report: Report) -> None:
        """The first word of a round's end counts."""
        if not self._has_reported:
            self._has_reported = True
            self._task.board.report.remote(self._round, report)

    def _pass_store_on(self) -> None:
        if self._view.store is not None and not self._has_met:
            self._has_met = True
            self._send(("store", self._view.store))

    def _pass_stop_on(self) -> None:
        reason = self._stop()
        if reason is not None and not self._was_stopped:
            self._was_stopped = True
            self._send(("stop", reason))

    def _send(self, message: Any) -> None:
        if self._child is None:
            return
        try:
            self._child.send(message)
        except OSError:  # it has gone; the zygote says how
            return


def report_of(rank: int, status: int, num_memory_kills: int) -> Report:
    """What a process that said nothing ended of. Pure.

    Args:
        status: as of `os.waitpid`.
        num_memory_kills: of the kernel on this host meanwhile.
    """
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        return Report(rank, "raised", f"rank {rank} left with exit code {code} and said nothing")
    name = signal.Signals(-code).name
    if -code == signal.SIGKILL and num_memory_kills > 0:
        return Report(rank, "out of memory", f"rank {rank} was killed by the kernel: the host was out of memory")
    return Report(rank, "killed", f"rank {rank} was ended by {name}")


def memory_kills() -> int:
    """How many processes the kernel has killed on this host for want of memory, of a container or of all."""
    try:
        lines = Path("/proc/vmstat").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)

"""A process that has imported everything a rank needs, and becomes that rank by forking: milliseconds, not seconds.

Neighbours: `supervisor.py` starts one with `Zygote` and asks it for a child each round; `child.py` is what the child
does. The zygote itself never starts a thread, never opens CUDA and never talks to Ray. See README.md, "In place".
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zlib
from contextlib import suppress
from multiprocessing.connection import Connection, Pipe

from raydz.errors import PlacementError

_PR_SET_PDEATHSIG = 1
_MESSAGE_BYTES = 1 << 18
_PATHS = "RAYDZ_ZYGOTE_PATHS"
_COMMAND = "from raydz.orchestrate.zygote import main; main()"
_FORK, _KILL, _LOAD = b"fork", b"kill", b"load"
_GONE_S = 30.0


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as the thread that made it ends, however that happens.

    Raises:
        SystemExit: it has ended already.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        raise SystemExit(1)


class Zygote:
    """The supervisor's side: forks one child at a time, and knows when it ends.

    As a context manager: nothing of it outlives the body.

    Args:
        task: what the children work on, packed by Ray's serialiser; the zygote unpacks it once for all of them.
        keep: file descriptors that the children shall have under the same numbers.

    Attributes:
        pid: of the child; None without one.
    """

    def __init__(self, task: bytes, keep: tuple[int, ...] = ()) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, _PATHS: json.dumps([path for path in sys.path if path])}
        with theirs:
            fds = (theirs.fileno(), *keep)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _COMMAND, str(theirs.fileno()), str(os.getpid())],
                env=environment, pass_fds=fds, stdin=subprocess.PIPE,
            )  # fmt: skip
        self._control, self.pid = ours, None
        self._successor: socket.socket | None = None
        self._elder: socket.socket | None = None
        self._has_loaded = False
        self._send_task(task)

    def _send_task(self, task: bytes) -> None:
        """Through its standard input, in a thread: a task may be long, and the zygote imports before it reads."""

        def send() -> None:
            stdin = self._process.stdin
            assert stdin is not None
            with suppress(BrokenPipeError), stdin:
                stdin.write(task)

        threading.Thread(target=send, name="raydz-task", daemon=True).start()

    pid: int | None

    def fileno(self) -> int:
        """Readable when something is to be heard by `hear`."""
        return self._control.fileno()

    def fork(self) -> Connection:
        """Start a child; returns the way to it. Blocking: the first time while the zygote imports.

        Raises:
            PlacementError: the zygote has gone.
        """
        assert self.pid is None, "one child at a time"
        self._prefer_successor()
        ours, theirs = Pipe()
        with theirs, suppress(OSError):  # it has gone: `hear` says so
            socket.send_fds(self._control, [_FORK], [theirs.fileno()])
        self.hear()
        return ours

    def load(self, modules: list[str]) -> None:
        """Import, beside the training, what a child had to import by itself: later ones will not have to. Once.

        A successor of the zygote does it, which then forks in its place; a child that is wanted earlier does not wait.

        Args:
            modules: in the order in which the child imported them.
        """
        if self._has_loaded:
            return
        self._has_loaded = True
        self._successor, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        packed = _LOAD + zlib.compress(json.dumps(modules).encode())
        with theirs, suppress(OSError):  # it has gone: `hear` says so
            socket.send_fds(self._control, [packed], [theirs.fileno()])

    def _prefer_successor(self) -> None:
        """From now on it forks, if it is ready; one that has ended never was."""
        successor = self._successor
        if successor is None or not select.select([successor], [], [], 0)[0]:
            return
        self._successor = None
        if successor.recv(_MESSAGE_BYTES):
            self._elder, self._control = self._control, successor  # which lives on: its end would be that of both

    def hear(self) -> int | None:
        """The wait status of the child that has ended, or None; what `fileno` announced.

        Raises:
            PlacementError: the zygote itself has gone.
        """
        try:
            data = self._control.recv(_MESSAGE_BYTES)
        except ConnectionResetError:  # it has gone without reading all it was sent
            data = b""
        if not data:
            raise PlacementError(
                "the process that starts ranks has ended", where=f"pid {self._process.pid}",
                got=f"exit code {self._process.wait(_GONE_S)}", remedy="its last words are in this worker's log",
            )  # fmt: skip
        message = json.loads(data)
        if "pid" in message:
            self.pid = int(message["pid"])
            return None
        self.pid = None
        return int(message["status"])

    def end_child(self) -> None:
        """SIGKILL for the child and whatever it started, by its parent, so that no number is reused meanwhile.

        Blocking: until it is gone.

        Raises:
            PlacementError: it is not gone within half a minute (it may hang in a driver), or the zygote has gone.
        """
        deadline = time.monotonic() + _GONE_S
        while self.pid is not None:
            with suppress(OSError):  # it has gone: `hear` says so
                self._control.send(_KILL)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise PlacementError("a rank's process cannot be ended", where=f"pid {self.pid}", got="SIGKILL sent")
            if select.select([self._control], [], [], min(left_s, 1.0))[0]:
                self.hear()

    def __enter__(self) -> Zygote:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(PlacementError):
            self.end_child()
        for control in (self._control, self._successor, self._elder):
            if control is not None:
                control.close()
        self._process.kill()  # a child that could not be ended goes with it
        self._process.wait()


# -- the process itself ------------------------------------------------------------------------------------------------


def main() -> None:
    """The zygote's life: import, read the task, fork on demand; in a child, be a rank."""
    control, parent = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2])
    die_with_parent(parent)
    sys.path[:] = json.loads(os.environ.pop(_PATHS))
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # counting GPUs opens no driver, so a fork is sound
    from raydz.orchestrate import child

    task = child.unpack(sys.stdin.buffer.read())
    _settle("what the model and loss need", "set failure.in_place to false if ranks fail to start")
    connection = _Nursery(control).run()
    if connection is not None:
        raise SystemExit(child.run(connection, task))


def _settle(what: str, remedy: str) -> bool:
    """Make ready for forks; whether they are sound after `what` was imported, said where they may not be."""
    import torch

    threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
    faults = (["it opened CUDA"] if torch.cuda.is_initialized() else []) + [f"it started {name}" for name in threads]
    if faults:
        print(f"raydz: {what} was imported and {'; '.join(faults)}: {remedy}", file=sys.stderr, flush=True)
    gc.collect()
    gc.freeze()  # what is here already is never written to by a collection: children share it
    return not faults


class _Nursery:
    """The zygote's loop."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._parent = control, os.getpid()
        self._woken, wake = os.pipe()
        os.set_blocking(wake, False)
        self._wake = wake
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self._child: int | None = None

    def run(self) -> Connection | None:
        """Fork until the supervisor goes: None; in a child its way to the supervisor."""
        while True:
            control = self._control.fileno()
            ready = select.select([control, self._woken], [], [])[0]
            if self._woken in ready:
                os.read(self._woken, _MESSAGE_BYTES)
                self._reap()
            if control in ready:
                try:
                    data, fds, _, _ = socket.recv_fds(self._control, _MESSAGE_BYTES, 1)
                except ConnectionResetError:  # it went without reading our last word
                    return None
                if not data:
                    return None
                if data == _KILL:
                    self._kill()
                elif data.startswith(_LOAD):
                    if os.fork() == 0:
                        return self._succeed(fds[0], json.loads(zlib.decompress(data[len(_LOAD) :])))
                    os.close(fds[0])
                elif (connection := self._fork(fds[0])) is not None:
                    return connection

    def _succeed(self, fd: int, modules: list[str]) -> Connection | None:
        """In a new process: import what is not here, and fork from then on, if that is still sound."""
        die_with_parent(self._parent)
        self._leave()
        for name in modules:
            if name not in sys.modules:
                with suppress(Exception):  # what a child did to make it importable is not known here
                    importlib.import_module(name)
        if not _settle("what this rank needed", "its later processes import that themselves"):
            return None
        control = socket.socket(fileno=fd)
        control.send(b"ready")
        return _Nursery(control).run()

    def _leave(self) -> None:
        """Let go, in a new process, of what is the zygote's."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._control.close()
        for pipe_fd in (self._woken, self._wake):
            os.close(pipe_fd)

    def _fork(self, fd: int) -> Connection | None:
        pid = os.fork()
        if pid:
            os.close(fd)
            self._child = pid
            self._tell({"pid": pid})
            return None
        os.setsid()  # a group of its own, so that what it starts can be ended with it
        die_with_parent(self._parent)
        self._leave()
        return Connection(fd)

    def _kill(self) -> None:
        """The child and what it started; its number is its own until it is reaped here."""
        if self._child is not None:
            with suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(self._child, signal.SIGKILL)
            os.kill(self._child, signal.SIGKILL)

    def _reap(self) -> None:
        if self._child is None or os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return
        self._kill()  # what it started, data loaders among it
        status = os.waitpid(self._child, 0)[1]
        self._child = None
        self._tell({"status": status})

    def _tell(self, message: dict[str, int]) -> None:
        with suppress(OSError):  # the supervisor has gone, and this process soon too
            self._control.send(json.dumps(message).encode())

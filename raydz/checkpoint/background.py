"""Saves behind training's back: snapshot, write, receipts, commit, in a thread of every rank.

Neighbours: `access.py` starts one and lets the next update wait for its snapshot; `snapshot.py` copies, `writer.py`
has the parts of a save, `exchange.py` joins the ranks. See "Saves in the background" in README.md.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial

import torch

from raydz import log
from raydz.checkpoint import data_file
from raydz.checkpoint.data_file import ChunkSums, FilePlan, plan_file
from raydz.checkpoint.exchange import ReceiptExchange
from raydz.checkpoint.find import checkpoint_uri
from raydz.checkpoint.manifest import DataFile
from raydz.checkpoint.snapshot import DeviceCopies, HostImage, keep_what_forward_changes
from raydz.checkpoint.writer import Part, SaveRequest, new_attempt
from raydz.errors import CheckpointError, Superseded
from raydz.exits import end_before_exit

SAVE_TIMEOUT_S = 1800.0
"""How long the ranks of one save wait for each other."""
EXIT_WAIT_S = 25.0
"""Of a process that ends in mid-save; torchrun kills half a minute after its SIGTERM."""
AfterCommit = Callable[[str], None]
_logger = log.get(__name__)


class SaveHandle:
    """A save that is under way in the background, as this rank sees it.

    Attributes:
        uri, folder, step: of the checkpoint.
        blocked_s: how long training has stood still for it so far.
        total_s: from the call to the commit; None while it is under way.
        num_bytes, total_bytes: size of this rank's data file, and of all ranks'; 0 until they are known.
        error: why it failed; None if it did not.
        is_given_up: nobody waits for it any more, not even the end of the process.
    """

    def __init__(self, request: SaveRequest) -> None:
        self.folder, self.step = request.folder, request.step
        self.uri = checkpoint_uri(request.store, request.folder)
        self.blocked_s, self.num_bytes, self.total_bytes = 0.0, 0, 0
        self.total_s: float | None = None
        self.error: CheckpointError | Superseded | None = None
        self.is_given_up = False
        self._copied, self._ended = threading.Event(), threading.Event()

    @property
    def done(self) -> bool:
        """Whether it has been committed or has failed."""
        return self._ended.is_set()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait for the end, at most so long; whether it has come. Not collective."""
        return self._ended.wait(timeout_s)

    def result(self, timeout_s: float | None = None) -> str:
        """The URI of the committed checkpoint. Not collective; all ranks get the same answer.

        Raises:
            CheckpointError: the save failed, or has not ended within the time.
        """
        if not self.wait(timeout_s):
            raise _unfinished(self, timeout_s)
        if self.error is not None:
            raise self.error
        return self.uri


class BackgroundSaves:
    """The saves of one engine; one at a time, from one host image.

    Collective: every rank makes one and begins the same saves in the same order. Nothing here uses process groups.
    """

    def __init__(self, exchange: ReceiptExchange, device: torch.device) -> None:
        self._exchange, self._device = exchange, device
        self._image = HostImage(pinned=device.type == "cuda")
        self._number = 0
        self._current: SaveHandle | None = None
        self._thread: threading.Thread | None = None
        self._blocked_s = 0.0

    @property
    def in_flight(self) -> SaveHandle | None:
        """The save that has not ended."""
        return None if self._current is None or self._current.done else self._current

    def begin(
        self, request: SaveRequest, *, timeout_s: float = SAVE_TIMEOUT_S, after_commit: AfterCommit | None = None
    ) -> SaveHandle:
        """Start a save of the state as it is now.

        Blocking: while the save before is under way, and to copy the module's buffers. The rest of the state is
        copied behind the next forward and backward: whoever changes it calls `finish_snapshot` before.

        Args:
            after_commit: runs on rank 0, in the save's thread, with the folder; what it raises is only logged.

        Raises:
            CheckpointError: the save before does not end.
        """
        started = time.perf_counter()
        if self._current is not None and not self._current.wait(2 * timeout_s):
            raise _unfinished(self._current, 2 * timeout_s)
        self._number += 1
        handle, copies = SaveHandle(request), DeviceCopies(self._device)
        request = replace(request, pieces=keep_what_forward_changes(request.pieces), state=_frozen(request))
        task = _Task(self._number, request, handle, timeout_s, after_commit, started)
        self._thread = threading.Thread(target=self._run, args=(task, copies), name="raydz-save", daemon=True)
        self._current = handle
        self._thread.start()
        end_before_exit(self._let_end)
        self._add_blocked(handle, started)
        return handle

    def finish_snapshot(self) -> None:
        """Wait until the state may change. Not collective."""
        handle = self._current
        if handle is None or handle._copied.is_set():
            return
        started = time.perf_counter()
        handle._copied.wait()
        self._add_blocked(handle, started)

    def take_blocked_s(self) -> float:
        """How long training has stood still for saves since the last call."""
        blocked_s, self._blocked_s = self._blocked_s, 0.0
        return blocked_s

    def close(self, timeout_s: float | None = None) -> bool:
        """Wait for the save in flight, at most so long, and give the host memory back; False leaves both be."""
        if self._current is not None and not self._current.wait(timeout_s):
            self._current.is_given_up = True
            return False
        self._image.release()
        return True

    def _let_end(self) -> None:
        """A process that ends without `close` gives its last save a chance; nobody is left to tell but the log."""
        handle = self._current
        if self._thread is None or handle is None or handle.is_given_up or not self._thread.is_alive():
            return
        self._thread.join(EXIT_WAIT_S)
        if handle.error is not None or not handle.done:
            _logger.error("the process ends: %s", handle.error or _unfinished(handle, EXIT_WAIT_S))

    def _add_blocked(self, handle: SaveHandle, started: float) -> None:
        elapsed_s = time.perf_counter() - started
        handle.blocked_s += elapsed_s
        self._blocked_s += elapsed_s

    # -- in the save's thread ------------------------------------------------------------------------------------------

    def _run(self, task: _Task, copies: DeviceCopies) -> None:
        handle = task.handle
        try:
            self._save(task, copies)
        except (CheckpointError, Superseded) as error:
            handle.error = error
        except BaseException as error:  # a thread has nobody else to tell
            handle.error = CheckpointError("the checkpoint was not saved", where=handle.uri, got=repr(error))
        finally:
            handle.total_s = time.perf_counter() - task.started
            handle._copied.set()
            handle._ended.set()

    def _save(self, task: _Task, copies: DeviceCopies) -> None:
        plan = self._snapshot(task, copies)
        attempt = self._exchange.agree_on(task.number, new_attempt(), task.timeout_s)
        part = Part(task.request, attempt, self._exchange.rank, self._exchange.world_size)
        try:
            receipt = part.write(plan, self._send)
        except Exception as error:  # told to all ranks, who wait for word of this one
            receipt = {"error": repr(error)}
        outcome = self._exchange.settle(task.number, receipt, part.decide, task.timeout_s)
        task.handle.total_bytes = part.conclude(outcome)
        if part.rank == 0 and task.after_commit is not None:
            try:
                task.after_commit(task.request.folder)
            except Exception as error:  # the checkpoint is committed; nothing after that may undo it
                _logger.warning("after the commit of %s: %s", task.handle.uri, error)

    def _snapshot(self, task: _Task, copies: DeviceCopies) -> Callable[[], FilePlan]:
        """Copy the state and let training go on; gives the plan of the copy, or raises what went wrong when asked."""
        try:
            plan = plan_file(task.request.pieces)
            self._image.reserve(plan.total_bytes)
            copies.run(plan, self._image)
            task.handle.num_bytes = plan.total_bytes
            return lambda: plan
        except Exception as error:
            return partial(_raise, error)
        finally:
            task.handle._copied.set()

    def _send(self, plan: FilePlan, part: Part) -> DataFile:
        """Write the image, and sum it up meanwhile."""
        sums, view = ChunkSums(), self._image.view
        with ThreadPoolExecutor(1, thread_name_prefix="raydz-save-sums") as pool:
            summing = pool.submit(sums.update, view)
            with part.request.store.writer(part.key, plan.total_bytes) as out:
                out.write(view, stays=True)
            summing.result()
        crcs = sums.finish()
        return DataFile(part.path, plan.total_bytes, data_file.CHUNK_BYTES, crcs, sums.whole, sums.algorithm)


@dataclass(frozen=True)
class _Task:
    """What the thread of one save is told."""

    number: int
    request: SaveRequest
    handle: SaveHandle
    timeout_s: float
    after_commit: AfterCommit | None
    started: float


def _raise(error: Exception) -> FilePlan:
    raise error


def _frozen(request: SaveRequest) -> dict:
    """The state beside the tensors as it is now; what is no JSON is refused by rank 0's part of the save."""
    try:
        return json.loads(json.dumps(dict(request.state)))
    except (TypeError, ValueError):
        return dict(request.state)


def _unfinished(handle: SaveHandle, timeout_s: float | None) -> CheckpointError:
    return CheckpointError(
        "a save in the background has not ended", where=handle.uri, got=f"nothing after {timeout_s:g} s",
        wanted="a commit or a failure", remedy="look at the store; checkpoint.timeout_s is the limit",
    )  # fmt: skip

"""A submitted job from its first line to its exit code, over streams that break and heads that restart.

Neighbours: `submit.py` waits with this; `job_client.py` asks. Ray's stream always begins at the log's first line, so
that a position in characters is all that must be kept. See README.md, "A log without gaps".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp
from ray.dashboard.modules.job.pydantic_models import JobDetails
from ray.job_submission import JobStatus

from raydz import log
from raydz.orchestrate.job_client import JobClient, JobServerAway, JobUnknown, insist

_logger = log.get(__name__)

STOPPED_EXIT_CODE = 143
"""Of a job that somebody stopped: as of a process that SIGTERM ended, which is what Ray sends it."""
_SILENCE_S, _LONGEST_SILENCE_S = 30.0, 480.0
_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 10.0
_REST_S = 30.0
_ENDED_BY_HOST = {9, 15}
"""SIGKILL and SIGTERM from outside Ray: the kernel short of memory, or a host that shuts down."""
_NEVER_RAN = {
    "RUNTIME_ENV_SETUP_FAILURE",
    "JOB_SUPERVISOR_ACTOR_START_TIMEOUT",
    "JOB_SUPERVISOR_ACTOR_START_FAILURE",
    "JOB_SUPERVISOR_ACTOR_UNSCHEDULABLE",
    "JOB_ENTRYPOINT_COMMAND_START_ERROR",
}


@dataclass(frozen=True)
class Outcome:
    """How a job ended.

    Args:
        status: `lost`: its driver or the cluster's head went away, which says nothing about the script.
        exit_code: the driver's own where there is one; never 0 unless it succeeded.
    """

    status: Literal["succeeded", "failed", "stopped", "lost"]
    exit_code: int
    reason: str


def judge(info: JobDetails) -> Outcome:
    """What the final state of a job means."""
    message = (info.message or "").strip()
    if info.status == JobStatus.SUCCEEDED:
        return Outcome("succeeded", 0, "the script ended with exit code 0")
    if info.status == JobStatus.STOPPED:
        return Outcome("stopped", STOPPED_EXIT_CODE, "the job was stopped")
    code = info.driver_exit_code
    if code is None:
        never_ran = str(info.error_type) in _NEVER_RAN
        return Outcome("failed" if never_ran else "lost", 1, message or "its driver is gone")
    shown = 128 - code if code < 0 else code  # a shell's way to tell of a signal
    if shown - 128 in _ENDED_BY_HOST:
        return Outcome("lost", shown, f"the script was ended from outside (signal {shown - 128})")
    return Outcome("failed", shown or 1, f"the script ended with exit code {shown}")


class JobFollower:
    """Writes a job's log, each character once and in order, until the job has ended.

    Args:
        write: takes pieces of the log, which need not be whole lines.
        patience_s: how long the cluster may be away before the job counts as lost.
    """

    def __init__(
        self, client: JobClient, job_id: str, write: Callable[[str], None], *, patience_s: float,
        silence_s: float = _SILENCE_S,
    ) -> None:  # fmt: skip
        self._client, self._job_id, self._write = client, job_id, write
        self._patience_s, self._silence_s = patience_s, silence_s
        self._where = f"job {job_id} at {client.get_address()}"
        self._written = 0
        self.num_streams = 0
        """How often the log was opened."""

    def run(self) -> Outcome:
        """Blocking: until the job has ended, or is lost.

        Raises:
            PlacementError: the cluster does not let us in any more.
        """
        silence_s, pause_s = self._silence_s, _PAUSE_S
        try:
            while True:
                before = self._written
                asyncio.run(self._stream(silence_s))
                info = insist(lambda: self._client.get_job_info(self._job_id), self._where, self._patience_s)
                if info.status.is_terminal():
                    self._write_rest()
                    return judge(info)
                if self._written > before:
                    silence_s, pause_s = self._silence_s, _PAUSE_S
                else:  # a quiet job, or a stream that breaks at once: ask less and less often
                    silence_s, pause_s = min(2 * silence_s, _LONGEST_SILENCE_S), min(2 * pause_s, _LONGEST_PAUSE_S)
                time.sleep(pause_s)
        except JobUnknown:
            return Outcome("lost", 1, "the cluster no longer knows the job: its head has started anew")
        except JobServerAway as error:
            return Outcome("lost", 1, f"the cluster was away for {self._patience_s:g} s: {error}")

    async def _stream(self, silence_s: float) -> None:
        """Write what one stream brings; returns when it ends, breaks, or says nothing for so long."""
        self.num_streams += 1
        position = 0
        stream: Any = self._client.tail_job_logs(self._job_id)  # a generator: it is closed below
        try:
            while True:
                text = await asyncio.wait_for(anext(stream), silence_s)
                self._write_from(position, text)
                position += len(text)
        except (StopAsyncIteration, asyncio.TimeoutError):
            pass
        except (aiohttp.ClientError, RuntimeError, OSError) as error:
            _logger.info("the log stream broke after %d characters: %s", position, error)
        finally:
            await stream.aclose()

    def _write_from(self, position: int, text: str) -> None:
        new = text[max(0, self._written - position) :]
        if new:
            self._write(new)
            self._written += len(new)

    def _write_rest(self) -> None:
        """What came after the stream's end; the stream may end before the log does."""
        try:
            whole = insist(lambda: self._client.get_job_logs(self._job_id), self._where, _REST_S)
        except (JobServerAway, JobUnknown) as error:
            _logger.warning("the last lines of the log may be missing: %s", error)
            return
        self._write_from(0, whole)

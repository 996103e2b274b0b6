"""What the end of a job means, and a log whose stream breaks; a fake client in the place of the cluster."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.job_submission import JobStatus

from raydz.orchestrate import job_client, job_follow
from raydz.orchestrate.job_follow import JobFollower, judge


def details(status: str, code: int | None = None, error_type: str | None = None, message: str = "") -> Any:
    return SimpleNamespace(status=JobStatus(status), driver_exit_code=code, error_type=error_type, message=message)


@pytest.mark.parametrize(
    ("info", "status", "code"),
    [
        (details("SUCCEEDED", 0), "succeeded", 0),
        (details("FAILED", 3), "failed", 3),
        (details("FAILED", -11), "failed", 139),
        (details("STOPPED"), "stopped", 143),
        (details("FAILED", -9), "lost", 137),
        (details("FAILED", 137), "lost", 137),
        (details("FAILED", 143), "lost", 143),
        (details("FAILED", None, "JOB_SUPERVISOR_ACTOR_DIED"), "lost", 1),
        (details("FAILED", None, "JOB_SUPERVISOR_ACTOR_UNKNOWN_FAILURE"), "lost", 1),
        (details("FAILED", None, "RUNTIME_ENV_SETUP_FAILURE", "no such package"), "failed", 1),
    ],
)
def test_outcome_and_exit_code(info, status, code):
    outcome = judge(info)
    assert (outcome.status, outcome.exit_code) == (status, code)
    assert outcome.status == "succeeded" or outcome.exit_code != 0


class FakeClient:
    """A log of which each stream shows a part, then breaks as told; after the last stream the job has ended."""

    def __init__(self, log: str, ends: list[tuple[int, Any]], infos: list[Any] | None = None) -> None:
        self.log, self.ends, self.infos = log, ends, infos or []
        self.streams = 0

    def get_address(self) -> str:
        return "http://fake"

    async def tail_job_logs(self, job_id: str):
        until, end = self.ends[min(self.streams, len(self.ends) - 1)]
        self.streams += 1
        for start in range(0, until, 7):
            yield self.log[start : min(start + 7, until)]
        if end == "silence":
            await asyncio.sleep(60)
        elif end is not None:
            raise end

    def get_job_info(self, job_id: str):
        if self.infos:
            found = self.infos.pop(0)
            if isinstance(found, Exception):
                raise found
            return found
        return details("SUCCEEDED", 0) if self.streams >= len(self.ends) else details("RUNNING")

    def get_job_logs(self, job_id: str) -> str:
        return self.log


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(job_follow, "_PAUSE_S", 0.01)
    monkeypatch.setattr(job_client, "_RETRY_S", 0.01)


def follow(client: FakeClient, patience_s: float = 0.2) -> tuple[str, Any]:
    written: list[str] = []
    follower = JobFollower(client, "job", written.append, patience_s=patience_s, silence_s=0.1)  # type: ignore[arg-type]
    outcome = follower.run()
    return "".join(written), outcome


LOG = "".join(f"line {i}\n" for i in range(40))


@pytest.mark.parametrize("end", [RuntimeError("reset"), ConnectionResetError(), None, "silence"])
def test_every_character_is_written_once_however_streams_end(end):
    client = FakeClient(LOG, [(50, end), (33, end), (120, end), (200, None)])  # the second shows less than the first
    written, outcome = follow(client)
    assert written == LOG and outcome.exit_code == 0
    assert client.streams == 4


def test_an_absence_shorter_than_the_patience_is_waited_for():
    away = ConnectionError("refused")
    client = FakeClient(LOG, [(90, away), (len(LOG), None)], infos=[away, away, details("RUNNING")])
    written, outcome = follow(client)
    assert written == LOG and outcome.status == "succeeded"


def test_a_cluster_that_stays_away_is_a_lost_job():
    client = FakeClient(LOG, [(90, None)], infos=[ConnectionError("refused")] * 1000)
    written, outcome = follow(client)
    assert (outcome.status, outcome.exit_code) == ("lost", 1) and "away" in outcome.reason
    assert written == LOG[:90]


def test_a_head_that_has_started_anew_is_a_lost_job():
    gone = RuntimeError("Request failed with status code 404: Job job does not exist.")
    _, outcome = follow(FakeClient(LOG, [(90, None)], infos=[gone]))
    assert outcome.status == "lost" and "anew" in outcome.reason

"""Send a script to a running cluster as a Ray job, wait for it, and send it again if its driver was lost.

Neighbours: `cli/submit.py` calls this; `package.py` measures what travels, `job_client.py` talks to the cluster,
`job_follow.py` waits. It is `ray job submit` with what that lacks: see README.md, "Submitting".
"""

from __future__ import annotations

import re
import secrets
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from raydz import log
from raydz.config.secrets import find_secrets
from raydz.errors import ConfigError, PlacementError
from raydz.orchestrate.job_client import JobClient, JobServerAway, JobUnknown, connect_to_jobs, insist
from raydz.orchestrate.job_follow import JobFollower, Outcome
from raydz.orchestrate.naming import RUN_NAME
from raydz.orchestrate.package import check_size, survey
from raydz.units import format_bytes

_logger = log.get(__name__)

STOP_WAIT_S = 60
"""What a job has between `ray job stop` and its end, to save a checkpoint; Ray's default is 3."""
_SUBMIT_S = 30.0


@dataclass(frozen=True)
class Submission:
    """What is to be run, and where.

    Args:
        command: words, the script's program first.
        address: of the cluster's dashboard; None: as in the environment.
        working_dir: a folder, a zip archive or the URI of one.
        run_name: `run.name` of the run, the same at every resubmission; None: the configuration's own.
        env: variables of the job; no credentials, which Ray would show on its dashboard.
        excludes: patterns of what does not travel.
        stop_wait_s: time for a last checkpoint after `ray job stop`.
    """

    command: Sequence[str]
    address: str | None = None
    working_dir: str = "."
    run_name: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    excludes: Sequence[str] = ()
    stop_wait_s: int = STOP_WAIT_S


@dataclass(frozen=True)
class Job:
    """A job that the cluster has accepted."""

    client: JobClient
    id: str

    def hints(self) -> list[tuple[str, str]]:
        """What a person may do with it: a word, and the command."""
        place = f"--address {self.client.get_address()} {self.id}"
        return [("follow", f"ray job logs --follow {place}"), ("stop", f"ray job stop {place}")]


def submit(submission: Submission) -> Job:
    """Check what travels, send it and start the job.

    Blocking: for the upload.

    Raises:
        ConfigError: the working directory is too large, or something in the submission is wrong.
        PlacementError: no cluster answers, or it refuses.
    """
    environment = _runtime_env(submission)
    _check_package(submission)
    client = connect_to_jobs(submission.address)
    job_id, where = _new_id(submission), f"the job server at {client.get_address()}"

    def send() -> str:
        try:
            return client.submit_job(
                entrypoint=shlex.join(submission.command), submission_id=job_id, runtime_env=environment,
                metadata={"raydz.run_name": submission.run_name or ""},
            )  # fmt: skip
        except RuntimeError as error:
            if f"{job_id} already exists" in str(error):  # the answer to a first try was lost
                return job_id
            raise

    try:
        insist(send, where, _SUBMIT_S)
    except (JobServerAway, JobUnknown) as error:
        raise PlacementError(
            "the job could not be submitted", where=where, got=str(error), remedy="look at `ray status` on the head"
        ) from None
    return Job(client, job_id)


def wait(
    submission: Submission, job: Job, write: Callable[[str], None], *, resubmit: int, patience_s: float,
    on_job: Callable[[Job], None] = lambda job: None,
) -> Outcome:  # fmt: skip
    """Follow a job to its end, and submit it again while its driver or the head was lost.

    Blocking: until then.

    Args:
        resubmit: how often at most.
        on_job: is told of every job that was submitted again.

    Raises:
        PlacementError: the cluster does not come back, or does not let us in.
    """
    while True:
        outcome = JobFollower(job.client, job.id, write, patience_s=patience_s).run()
        if outcome.status != "lost" or resubmit == 0:
            return outcome
        _logger.warning("job %s is lost: %s; submitting it again (%d times at most)", job.id, outcome.reason, resubmit)
        resubmit -= 1
        job = submit(submission)
        on_job(job)


def _runtime_env(submission: Submission) -> dict[str, Any]:
    if not submission.command:
        raise ConfigError("nothing to run", where="raydz submit", remedy="raydz submit -- python jobs/pretrain.py …")
    if submission.run_name is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}", submission.run_name):
        raise ConfigError(
            "not a name for a run", where="--run-name", got=submission.run_name,
            wanted="letters, digits, dot, underscore and dash, 128 at most, a letter or digit first",
        )  # fmt: skip
    if found := list(find_secrets(dict(submission.env))):
        raise ConfigError(
            "credentials do not travel with a job: Ray shows its environment on the dashboard",
            where=f"--env {found[0].path}",
            remedy="give the cluster's nodes a role, a profile or variables of their own",
        )
    names = {RUN_NAME: submission.run_name} if submission.run_name else {}
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": str(submission.stop_wait_s), **names, **submission.env}
    return {"working_dir": submission.working_dir, "excludes": list(submission.excludes), "env_vars": variables}


def _check_package(submission: Submission) -> None:
    if "://" in submission.working_dir or submission.working_dir.endswith(".zip"):
        return
    package = survey(submission.working_dir, submission.excludes)
    check_size(package)
    largest = ", ".join(f"{name} {format_bytes(size)}" for name, size in package.largest(3))
    _logger.info(
        "%d files travel, %s%s",
        len(package.files), format_bytes(package.total_bytes), f"; the largest: {largest}" if largest else "",
    )  # fmt: skip
    for word in package.left_out(submission.command):
        _logger.warning(
            "%s is in the command and here, but .gitignore, .rayignore or an exclude keeps it from travelling", word
        )


def _new_id(submission: Submission) -> str:
    return f"raydz-{submission.run_name or 'run'}-{secrets.token_hex(4)}"

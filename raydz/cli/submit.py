"""`raydz submit`: the words of the command line, what is printed, and the exit code.

Neighbours: `main.py` has the command; `raydz.orchestrate.submit` does the work. The job's log goes to standard output
as it is, everything of raydz's own to standard error.
"""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from raydz.errors import ConfigError

if TYPE_CHECKING:
    from raydz.orchestrate.submit import Job, Submission

PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""For typer: from the first word of the command on, options are the command's."""

_TALKATIVE = (
    "ray._private.runtime_env.packaging",  # a line for every ignore file
    "ray._private.runtime_env.working_dir",
    "ray.dashboard.modules.dashboard_sdk",
    "ray.dashboard.modules.job.sdk",  # a line for every end of a stream
)
"""Loggers of Ray that say in many lines what raydz says in one."""


def submit(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="For example python jobs/pretrain.py.")],
    address: Annotated[
        str | None, typer.Option(help="Dashboard of the cluster, http://host:8265; else RAY_API_SERVER_ADDRESS.")
    ] = None,
    working_dir: Annotated[str, typer.Option(help="Folder that travels, a zip archive or its URI.")] = ".",
    run_name: Annotated[str | None, typer.Option(help="run.name of the run, for a configuration without one.")] = None,
    env: Annotated[
        list[str] | None, typer.Option("--env", metavar="NAME=VALUE", help="Variable of the job; no credentials.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(metavar="PATTERN", help="What does not travel.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Follow the log; end with the script's exit code.")] = False,
    resubmit: Annotated[
        int, typer.Option(min=0, help="Submit again so often if driver or head is lost; waits, too.")
    ] = 0,
    patience_s: Annotated[
        float, typer.Option(min=0, help="How long the cluster may be away before the job counts as lost.")
    ] = 600.0,
    stop_wait_s: Annotated[
        int | None, typer.Option(min=1, help="Time for a last checkpoint after `ray job stop` [default: 60].")
    ] = None,
) -> None:
    """Run a script on a Ray cluster, as `ray job submit` does, and know how it ends.

    Exit code: 0 once it is submitted; with --wait the script's own, 143 if the job was stopped, 1 if it was lost, 130
    after Ctrl-C, which leaves the job running.
    """
    from raydz.orchestrate.submit import STOP_WAIT_S, Submission
    from raydz.orchestrate.submit import submit as send

    for name in _TALKATIVE:  # they set their levels when they are imported
        logging.getLogger(name).setLevel(logging.ERROR)
    submission = Submission(
        command, address, working_dir, run_name, _variables(env or ()), exclude or (), stop_wait_s or STOP_WAIT_S
    )
    job = send(submission)
    tell(f"job {job.id} is submitted to {job.client.get_address()}")
    if not (wait or resubmit):
        _tell_hints(job)
        return
    raise typer.Exit(_wait(submission, job, resubmit, patience_s))


def _wait(submission: Submission, job: Job, resubmit: int, patience_s: float) -> int:
    from raydz.orchestrate.submit import wait as wait_for

    newest = job

    def note(job: Job) -> None:
        nonlocal newest
        newest = job
        tell(f"job {job.id} is submitted")

    try:
        outcome = wait_for(submission, job, _write, resubmit=resubmit, patience_s=patience_s, on_job=note)
    except KeyboardInterrupt:
        tell(f"\nno longer following; job {newest.id} goes on")
        _tell_hints(newest)
        return 130
    tell(f"job {newest.id} {outcome.status}: {outcome.reason}")
    if outcome.status == "lost":
        tell("  the same command goes on from the run's newest checkpoint; with --resubmit N that happens by itself")
    return outcome.exit_code


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def tell(text: str) -> None:
    """Print beside the job's log."""
    print(text, file=sys.stderr, flush=True)


def _tell_hints(job: Job) -> None:
    for word, command in job.hints():
        tell(f"  {word}: {command}")


def _variables(pairs: list[str] | tuple[()]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, mark, value = pair.partition("=")
        if not (name and mark):
            raise ConfigError("not a variable", where="--env", got=name, wanted="NAME=VALUE")
        found[name] = value
    return found

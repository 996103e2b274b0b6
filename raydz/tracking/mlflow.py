"""MLflow as a sink: one run over all restarts, each step once, a status that is true.

Layer 3; the only file that imports mlflow, and only when a sink connects (the import takes seconds). Its methods are
called by the thread of `tracking.publisher`. The README's "One run" says how restarts are kept from doubling points.
"""

from __future__ import annotations

import os
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raydz import log
from raydz.errors import ConfigError
from raydz.tracking.credentials import redact
from raydz.tracking.journal import Point

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

_log = log.get(__name__)

_METRICS_A_REQUEST = 1000  # MLflow's own limits; a request within them is one transaction
_PARAMS_A_REQUEST = 100
STATUSES = ("FINISHED", "FAILED", "KILLED")
_ERROR_CHARS = 5000
_PARAM_CHARS = 6000  # MLflow cuts longer ones, and they would look changed after a restart
_IN_EVERY_STEP = "attempt"  # the metric whose history tells which steps MLflow holds

_PROCESS_DEFAULTS = {
    # MLflow's own defaults, 7 retries of 120 s, held a call for four minutes while its server was down.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True)
class TrackedRun:
    """Which MLflow run, and what is written when it opens.

    Args:
        key: identity over restarts; one key is one run. A training that starts over needs a new key.
        params: written once; MLflow's params cannot change. Values that differ after a restart become tags
            `raydz.attempt.<k>.<param>`.
        parent_run_id: makes it a nested run, for a stage of a pipeline.
    """

    tracking_uri: str
    experiment: str
    key: str
    name: str
    attempt: int = 0
    params: Mapping[str, Any] = field(default_factory=dict)
    parent_run_id: str | None = None


class MlflowSink:
    """A `publisher.Sink` that writes one MLflow run.

    Blocking: each call is bounded by MLflow's request timeout and retries (about 20 s while a server is silent).
    Sets MLFLOW_HTTP_REQUEST_MAX_RETRIES, MLFLOW_HTTP_REQUEST_TIMEOUT and MLFLOW_DISABLE_TELEMETRY for this process
    where they are unset.
    """

    def __init__(self, run: TrackedRun) -> None:
        if "'" in run.key:
            raise ConfigError("a run key cannot hold a quote", where="run.name", got=run.key, remedy="rename the run")
        self._run = run
        self._session = uuid.uuid4().hex  # tells our own half-made connection from a dead process's
        self._opened: MlflowClient | None = None
        self.run_id: str | None = None

    def connect(self) -> int:
        """Find the run by its key or create it, set it RUNNING, write params. Returns the largest step it holds.

        Raises:
            ConfigError: the URI or the experiment can never work.
        """
        client = open_client(self._run.tracking_uri)
        experiment_id = _experiment(client, self._run)
        run = find_run(client, experiment_id, self._run.key)
        last_step = -1 if run is None else _last_step(client, run.info.run_id)
        if run is None:
            run = self._create(client, experiment_id)
        else:
            self._reopen(client, run)
        self._write_params(client, run)
        self._opened, self.run_id = client, run.info.run_id
        return last_step

    def publish(self, points: Sequence[Point]) -> None:
        """Write points; whole steps a request, so that the server holds all of a step or nothing."""
        from mlflow.entities import Metric

        for batch in _batches(points):
            rows = [Metric(name, value, p.time_ms, p.step) for p in batch for name, value in p.metrics.items()]
            self._client.log_batch(self._id, metrics=rows, synchronous=True)

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set or replace tags."""
        _set_tags(self._client, self._id, tags)

    def log_text(self, name: str, text: str) -> None:
        """Store a text as an artifact called `name`."""
        self._client.log_text(self._id, text, name)

    def finish(self, status: str, error: str | None) -> None:
        """End the run as FINISHED, FAILED or KILLED; the error goes into the tag `raydz.error`, without secrets."""
        end_run(self._client, self._id, status, error, self._run.attempt)

    @property
    def _client(self) -> MlflowClient:
        assert self._opened is not None, "the publisher connects before it publishes"
        return self._opened

    @property
    def _id(self) -> str:
        assert self.run_id is not None, "the publisher connects before it publishes"
        return self.run_id

    def _create(self, client: MlflowClient, experiment_id: str) -> Run:
        tags = {"raydz.run_key": self._run.key, **self._attempt_tags()}
        if self._run.parent_run_id:
            tags["mlflow.parentRunId"] = self._run.parent_run_id
        return client.create_run(experiment_id, tags=tags, run_name=self._run.name)

    def _reopen(self, client: MlflowClient, run: Run) -> None:
        """Go on with the run; where it still says RUNNING, its process died without a word, and a tag says so."""
        tags = self._attempt_tags()
        old = run.data.tags
        status = f"raydz.attempt.{old.get('raydz.attempt', '?')}.status"
        if run.info.status == "RUNNING" and old.get("raydz.session") != self._session and status not in old:
            tags[status] = "KILLED"
        _set_tags(client, run.info.run_id, tags)
        if "raydz.error" in old:
            client.delete_tag(run.info.run_id, "raydz.error")  # its copy under the attempt stays
        client.update_run(run.info.run_id, status="RUNNING")

    def _attempt_tags(self) -> dict[str, str]:
        return {"raydz.attempt": str(self._run.attempt), "raydz.session": self._session}

    def _write_params(self, client: MlflowClient, run: Run) -> None:
        from mlflow.entities import Param

        old = run.data.params
        wanted = {name: redact(str(value))[:_PARAM_CHARS] for name, value in self._run.params.items()}
        new = [Param(name, value) for name, value in wanted.items() if name not in old]
        for start in range(0, len(new), _PARAMS_A_REQUEST):
            client.log_batch(run.info.run_id, params=new[start : start + _PARAMS_A_REQUEST], synchronous=True)
        changed = {name: value for name, value in wanted.items() if name in old and value != old[name]}
        prefix = f"raydz.attempt.{self._run.attempt}"
        _set_tags(client, run.info.run_id, {f"{prefix}.{name}": value for name, value in changed.items()})


def open_client(tracking_uri: str) -> MlflowClient:
    """A client for a URI; MLflow is imported here.

    Raises:
        ConfigError: MLflow knows no such store, or refuses it.
    """
    for name, value in _PROCESS_DEFAULTS.items():
        os.environ.setdefault(name, value)
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    scheme = tracking_uri.partition(":")[0]
    try:
        return MlflowClient(tracking_uri=tracking_uri)
    except (MlflowException, ImportError) as error:
        if isinstance(error, MlflowException) and error.get_http_status_code() >= 500 and scheme != "file":
            raise  # a database that does not answer may answer later
        raise ConfigError(
            "MLflow refuses the tracking URI",
            where="tracking.mlflow_uri",
            got=f"{scheme}: {redact(str(error))[:300]}",
            wanted="http(s)://host:port or sqlite:///<absolute path>",
        ) from error


def find_run(client: MlflowClient, experiment_id: str, key: str) -> Run | None:
    """The run of a key; the oldest, should two processes ever have created it in the same moment."""
    runs = client.search_runs(
        [experiment_id],
        filter_string=f"tags.`raydz.run_key` = '{key}'",
        order_by=["attributes.start_time ASC"],
        max_results=2,
    )
    if len(runs) > 1:
        _log.warning("two MLflow runs have the run key %s; going on with the older, %s", key, runs[0].info.run_id)
    return runs[0] if runs else None


def end_run(client: MlflowClient, run_id: str, status: str, error: str | None, attempt: int) -> None:
    """Set the final status, and before it the tags that explain it."""
    tags = {f"raydz.attempt.{attempt}.status": status}
    if error is not None:
        text = redact(error)[:_ERROR_CHARS]
        tags |= {f"raydz.attempt.{attempt}.error": text, "raydz.error": text}
    _set_tags(client, run_id, tags)
    client.set_terminated(run_id, status=status, end_time=int(time.time() * 1000))


def settle_run(tracking_uri: str, experiment: str, key: str, status: str, error: str | None = None) -> bool:
    """Give a run that still says RUNNING its true status: for a driver whose workers died and will not come back.

    Blocking: up to about a minute while the server is silent.

    Returns:
        Whether there was such a run.

    Raises:
        ConfigError: the URI cannot work.
        mlflow.exceptions.MlflowException: the server does not answer.
    """
    client = open_client(tracking_uri)
    found = client.get_experiment_by_name(experiment)
    run = find_run(client, found.experiment_id, key) if found else None
    if run is None or run.info.status != "RUNNING":
        return False
    end_run(client, run.info.run_id, status, error, int(run.data.tags.get("raydz.attempt", 0)))
    return True


def _experiment(client: MlflowClient, run: TrackedRun) -> str:
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(run.experiment)
    if found is None:
        try:
            return client.create_experiment(run.experiment, artifact_location=_artifact_location(run))
        except MlflowException:  # another job may have created it since we looked
            found = client.get_experiment_by_name(run.experiment)
            if found is None:
                raise
    if found.lifecycle_stage == "deleted":
        raise ConfigError(
            "the MLflow experiment is deleted",
            where="tracking.experiment",
            got=run.experiment,
            remedy="restore it (mlflow experiments restore) or choose another name",
        )
    return found.experiment_id


def _artifact_location(run: TrackedRun) -> str | None:
    """Beside the database for sqlite, where MLflow would take the working directory; else the server decides."""
    if not run.tracking_uri.startswith("sqlite:///"):
        return None
    database = Path(run.tracking_uri.removeprefix("sqlite:///").partition("?")[0]).resolve()
    return (database.parent / "mlartifacts" / run.experiment).as_uri()


def _last_step(client: MlflowClient, run_id: str) -> int:
    return max((row.step for row in client.get_metric_history(run_id, _IN_EVERY_STEP)), default=-1)


def _set_tags(client: MlflowClient, run_id: str, tags: Mapping[str, str]) -> None:
    from mlflow.entities import RunTag

    rows = [RunTag(name, redact(value)) for name, value in tags.items()]
    for start in range(0, len(rows), _PARAMS_A_REQUEST):
        client.log_batch(run_id, tags=rows[start : start + _PARAMS_A_REQUEST], synchronous=True)


def _batches(points: Sequence[Point]) -> Iterator[list[Point]]:
    """Split points at steps so that each piece fits into one request."""
    batch: list[Point] = []
    num_metrics = 0
    for point in points:
        if batch and num_metrics + len(point.metrics) > _METRICS_A_REQUEST:
            yield batch
            batch, num_metrics = [], 0
        batch.append(point)
        num_metrics += len(point.metrics)
    if batch:
        yield batch

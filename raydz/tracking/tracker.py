"""What rank 0 holds to record a run: the journal always, MLflow behind it if it is configured.

Layer 3. Made by `train/loop.py` on rank 0. A step goes to `tracking.journal` and from there, by the thread of
`tracking.publisher`, to `tracking.mlflow`. Events go to `events.jsonl` beside the journal.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydz import log
from raydz.errors import ConfigError, StorageError
from raydz.tracking.credentials import redact, redact_fields, refuse_credentials
from raydz.tracking.events import EVENTS_NAME
from raydz.tracking.journal import Journal, Point
from raydz.tracking.lines import LineFile, read_lines
from raydz.tracking.metrics import check_names
from raydz.tracking.mlflow import STATUSES, MlflowSink, TrackedRun
from raydz.tracking.publisher import Publisher

_log = log.get(__name__)

_CONNECT_S = 30.0  # a first start also creates the database's tables
_BASELINE_S = 10.0


class Tracker:
    """Records one run. Only rank 0 has one, and only one thread uses it.

    No method but `start`, `log_baseline` and `finish` waits for anything but one write to a local file.
    """

    def __init__(self, run_dir: Path, journal: Journal, attempt: int, resume_step: int) -> None:
        self._journal, self._attempt, self._resume_step = journal, attempt, resume_step
        self._events = LineFile(run_dir / EVENTS_NAME)
        self._sink: MlflowSink | None = None
        self._publisher: Publisher | None = None
        self._is_first_start = attempt == 0 and resume_step == 0
        self._is_finished = False
        self.lost_points = 0
        """Steps that the journal could not take (disk full) and that nobody will ever see."""

    @classmethod
    def start(
        cls,
        *,  # ten parameters: each is one field of the caller's configuration or state, named once, here
        run_dir: str | Path,
        run_key: str,
        run_name: str,
        config_text: str,
        params: Mapping[str, Any],
        mlflow_uri: str | None,
        experiment: str,
        resume_step: int = 0,
        attempt: int = 0,
        parent_run_id: str | None = None,
    ) -> Tracker:
        """Open the journal at `resume_step`, and the MLflow run of `run_key` if there is a URI.

        An MLflow that is down is no error: a warning, and its share of the journal is replayed when it is back.

        Args:
            run_dir: local folder; `journal.jsonl` and `events.jsonl` live there.
            run_key: identity of the run over restarts; a training that starts over needs another.
            config_text: the resolved config; becomes the artifact `config.yaml`.
            resume_step: last step of the checkpoint that was loaded; 0 for none.
            attempt: how often the run was restarted.
            parent_run_id: MLflow run to nest under.

        Blocking: a first start until MLflow has answered or failed once, at most 30 s; a restart not at all.

        Raises:
            StorageError: the journal cannot be written.
            ConfigError: the URI holds credentials, or (in a run's first start) MLflow can never work as configured.
        """
        if mlflow_uri is not None:
            refuse_credentials(mlflow_uri)
        if "://" in str(run_dir):
            raise ConfigError("the run folder is not local", where="run.root", got=redact(str(run_dir)))
        path = Path(run_dir)
        tracker = cls(path, Journal.open(path / "journal.jsonl", resume_step, attempt), attempt, resume_step)
        tracker.log_event("start", {"step": resume_step})
        if mlflow_uri is not None:
            run = TrackedRun(mlflow_uri, experiment, run_key, run_name, attempt, params, parent_run_id)
            tracker._connect(MlflowSink(run), config_text)
        return tracker

    def _connect(self, sink: MlflowSink, config_text: str) -> None:
        self._sink = sink
        self._publisher = publisher = Publisher(self._journal.path, sink)
        baseline = self._first_baseline()
        if baseline is not None:
            publisher.set_baseline(baseline)
        publisher.annotate(texts={"config.yaml": redact(config_text)})
        if not self._is_first_start:  # a restart neither waits for its telemetry nor dies of it
            return
        publisher.flush(_CONNECT_S)
        if publisher.refusal is not None:
            self._journal.close()
            self._events.close()
            raise publisher.refusal

    @property
    def mlflow_run_id(self) -> str | None:
        """The run's id; None without MLflow, or while it has not answered yet."""
        return self._sink.run_id if self._sink else None

    @property
    def failures(self) -> int:
        """How often MLflow failed to take something so far."""
        return self._publisher.failures if self._publisher else 0

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, already reduced over ranks.

        A step is recorded once: evaluate first, then record, then save the checkpoint of that step. A journal that
        cannot be written costs the point (`lost_points`), not the training.

        Raises:
            ConfigError: a name that is not in the table.
            ValueError: the step is not after the last one.
        """
        check_names(metrics)
        try:
            self._journal.append(step, metrics)
        except StorageError as error:
            self._warn_lost(error)
            return
        if self._publisher:
            self._publisher.line_added()

    def _warn_lost(self, error: StorageError) -> None:
        if not self.lost_points:
            _log.error("the journal cannot be written; training goes on without a record:\n%s", error)
        self.lost_points += 1

    def log_event(self, kind: str, fields: Mapping[str, Any] | None = None) -> None:
        """Write a line to `events.jsonl`: {"event": kind, "time": ..., "attempt": k, **fields}.

        Args:
            fields: JSON values; texts are cleared of secrets.
        """
        clean = redact_fields(dict(fields or {}))
        log.event(kind, {"attempt": self._attempt, **clean})
        try:
            self._events.append({"event": kind, "time": round(time.time(), 3), "attempt": self._attempt, **clean})
        except StorageError as error:
            _log.error("the event %s cannot be written:\n%s", kind, error)

    def log_baseline(self, metrics: Mapping[str, float]) -> None:
        """Record what was measured before the first step, so that it is known even if that step dies.

        A run has one baseline: later attempts write theirs only to `events.jsonl`.

        Blocking: a first start at most 10 s, for MLflow to take it; a restart not at all.

        Raises:
            ConfigError: a name that is not in the table.
        """
        check_names(metrics)
        self.log_event("baseline", {"step": self._resume_step, "metrics": dict(metrics)})
        baseline = self._first_baseline()
        if self._publisher and baseline is not None:
            self._publisher.set_baseline(baseline)
            if self._is_first_start:
                self._publisher.flush(_BASELINE_S)

    def _first_baseline(self) -> Point | None:
        """From the file, so that a baseline MLflow never took goes out with a later attempt."""
        for event in read_lines(self._events.path):
            if event.get("event") == "baseline" and isinstance(event.get("metrics"), dict):
                metrics = {**event["metrics"], "attempt": float(event["attempt"])}
                return Point(event["step"], int(event["time"] * 1000), metrics)
        return None

    def set_tags(self, tags: Mapping[str, str]) -> None:
        """Set tags of the MLflow run (the newest checkpoint, the cluster's size); without MLflow they go nowhere."""
        if self._publisher:
            self._publisher.annotate(tags=tags)

    def log_text(self, name: str, text: str) -> None:
        """Store a small text (memory plan, manifest) as an artifact of the MLflow run, cleared of secrets."""
        if self._publisher:
            self._publisher.annotate(texts={name: redact(text)})

    def pause(self, reason: str, timeout_s: float = 30.0) -> int:
        """End this attempt, not the run: MLflow's stays RUNNING for the attempt that follows, with a tag of this one.

        Blocking, and returns: as `finish`.
        """
        if self._is_finished:
            return 0
        self.set_tags({f"raydz.attempt.{self._attempt}.status": "PAUSED"})
        return self._end("pause", {"reason": reason}, None, None, timeout_s)

    def finish(self, status: str, error: str | None = None, timeout_s: float = 30.0) -> int:
        """End the run as FINISHED, FAILED or KILLED. A second call does nothing.

        Blocking: at most `timeout_s`, for MLflow to take the rest.

        Returns:
            Steps that MLflow has not got. They are in the journal; the next start with this run key publishes them.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status}: one of {', '.join(STATUSES)}")
        if self._is_finished:
            return 0
        return self._end("finish", {"status": status, "error": error}, status, error, timeout_s)

    def _end(self, kind: str, fields: dict[str, Any], status: str | None, error: str | None, timeout_s: float) -> int:
        """The last event, and the rest to MLflow."""
        self._is_finished = True
        self.log_event(kind, {**fields, "lost_points": self.lost_points})
        left = self._publisher.close(timeout_s, status, error) if self._publisher else 0
        if left:
            _log.warning("%d steps stay in the journal; the next start of this run publishes them", left)
        try:
            self._journal.close()
            self._events.close()
        except StorageError as error:
            _log.error("%s", error)  # the lines were written; only their way to the disk is in doubt
        return left

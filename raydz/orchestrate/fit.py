"""`raydz.fit`: one Ray Train run whose workers call the training loop, restarted from the newest checkpoint.

Neighbours: `jobs/pretrain.py` calls `fit`; `worker.py` runs on every rank; `preflight.py` fails early; `board.py`
carries results and errors home; `policy.py` decides about restarts; `cluster.py` connects. See README.md, "A restart".
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raydz import log
from raydz.config import Config, check_trainable, load, resolve_paths
from raydz.errors import PlacementError, RaydzError, TrainingError
from raydz.orchestrate.board import Standing, new_board
from raydz.orchestrate.cluster import check_resources, connect
from raydz.orchestrate.failures import Failure, Kind, classify
from raydz.orchestrate.interruption import describe_failure, interrupted, tell
from raydz.orchestrate.naming import named_by_submission
from raydz.orchestrate.policy import GiveUp, decide
from raydz.orchestrate.preflight import run_preflight
from raydz.orchestrate.stop import StopSignals
from raydz.orchestrate.watchdog import Watchdog
from raydz.orchestrate.worker import WorkerTask, train_worker
from raydz.tracking import settle_run
from raydz.train import Result
from raydz.train.build import LossFunction, ModelFunction
from raydz.train.summary import describe_result

_logger = log.get(__name__)


def fit(
    config: Config | dict | str | Path,
    *,
    overrides: Sequence[str] = (),
    model: ModelFunction | None = None,
    loss: LossFunction | None = None,
) -> Result:
    """Train on a Ray cluster: the one of this job, the one at RAY_ADDRESS, or a local one that is started.

    Args:
        config: a configuration, a dict, or the path of a YAML or JSON file.
        overrides: `key=value` for dotted keys.
        model: builds people's own `nn.Module` (called with the configuration if it takes an argument).
        loss: (model, micro-batch) -> sum of the losses of its valid tokens; next-token prediction if None.

    Blocking: until the run is finished, stopped, or given up. SIGINT (Ctrl-C) and SIGTERM let the workers save and end;
    fit then raises what the signal would have raised, and the same call goes on from there. See README.md, "Stop".

    Raises:
        ConfigError, DataError, StorageError, CheckpointError: bad input, before any step; never retried.
        PlacementError: a local cluster is too small.
        KeyboardInterrupt, SystemExit: the run was stopped.
        TrainingError: more failures than `failure` forgives, or training that cannot go on.
    """
    log.setup(0)
    config = resolve_paths(named_by_submission(load(config, overrides)))
    log.setup(0, as_json=config.tracking.log_json)
    check_trainable(config)
    config.engine().batch(config.scaling.num_workers)
    print(config.to_yaml(), flush=True)
    is_own_cluster = connect()
    resources = worker_resources(config)
    check_resources(resources, config.scaling.num_workers, can_grow=not is_own_cluster)
    run_preflight(config, resources)
    with StopSignals() as signals:
        try:
            result = _train_to_the_end(config, model, loss, resources, signals)
        except BaseException as error:
            if signals.number is None or signals.is_urgent:
                raise
            _settle(config, TrainingError("the run was stopped before it could save"), "KILLED")
            raise signals.end() from error
        if result.status == "stopped" and signals.number is not None:
            print(describe_result(result), flush=True)
            raise signals.end()
    return result


def _train_to_the_end(
    config: Config, model: ModelFunction | None, loss: LossFunction | None, resources: dict[str, float],
    signals: StopSignals,
) -> Result:  # fmt: skip
    """Attempt after attempt, as `policy.decide` says."""
    failures: list[Failure] = []
    task = WorkerTask(config=config, model=model, loss=loss, board=None)
    while True:
        board = new_board()
        task = replace(task, board=board, token=uuid.uuid4().hex, number=len(failures))
        try:
            with Watchdog(board, config.failure) as watchdog:
                signals.run(_trainer(config, task, resources).fit, board.ask_to_stop.remote)
            break
        except Exception as error:
            if signals.number is not None:
                raise
            standing, board_now = ray.get(board.standing.remote())
            failures.append(_failure(error, board, watchdog, standing))
            decision = decide(failures, config.failure)
            event = describe_failure(failures[-1], decision, len(failures), time.time())
            tell(Path(config.run.root) / str(config.run.name), event)
            if isinstance(decision, GiveUp):
                given_up = decision.error or _given_up(config, error, decision)
                _settle(config, given_up)
                raise given_up from error
            _logger.warning("restarting from the newest checkpoint: %s", decision.reason)
            interruption = interrupted(task.interruption, event, standing, board_now)
            task = replace(
                task, skips=task.skips | decision.skips, before_step=decision.before_step, interruption=interruption
            )
            time.sleep(decision.pause_s)
    result = ray.get(board.result.remote())
    if result is None:
        raise TrainingError("the workers ended without a result", where=f"run {config.run.name}")
    return result


def _failure(error: Exception, board: Any, watchdog: Watchdog, standing: Standing) -> Failure:
    """What is known of an attempt that ended with `error`."""
    said = ray.get(board.failure.remote())
    kind, cause = classify(error, said, had_begun=standing.began is not None)
    if watchdog.found is not None:
        kind, cause = Kind.HANG, watchdog.found
    began = next((step for step in (standing.began, standing.chose) if step is not None), 0)
    return Failure(kind, time.monotonic(), standing.step, began, cause, said)


def worker_resources(config: Config) -> dict[str, float]:
    """What one worker asks Ray for."""
    scaling = config.scaling
    gpus: float = 0.0
    if scaling.gpus_per_worker == "auto":
        gpus = 1.0 if config.train.device != "cpu" and ray.cluster_resources().get("GPU", 0) else 0.0
    else:
        gpus = float(scaling.gpus_per_worker)
    wanted: dict[str, float] = {"CPU": scaling.cpus_per_worker, **scaling.resources_per_worker}
    return wanted | ({"GPU": gpus} if gpus else {})


def _trainer(config: Config, task: WorkerTask, resources: dict[str, float]) -> TorchTrainer:
    has_gpu = "GPU" in resources
    return TorchTrainer(
        train_worker,
        train_loop_config={"task": task},
        torch_config=TorchConfig(
            backend="nccl" if has_gpu else "gloo", timeout_s=int(config.parallel.collective_timeout_s)
        ),
        scaling_config=ScalingConfig(
            num_workers=config.scaling.num_workers, use_gpu=has_gpu, resources_per_worker=dict(resources)
        ),
        run_config=RunConfig(
            name=str(config.run.name),
            storage_path=str(Path(config.run.root) / str(config.run.name) / "ray"),
            failure_config=FailureConfig(max_failures=0),  # retries are ours: see `policy.py`
        ),
    )


def _given_up(config: Config, error: Exception, decision: GiveUp) -> RaydzError:
    return TrainingError(
        f"run {config.run.name} was given up",
        where=type(error).__name__,
        got=_last_line(error),
        wanted=decision.reason,
        remedy="the workers' tracebacks are above; the same command continues from the newest checkpoint",
    )


def _last_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else repr(error)


def _settle(config: Config, error: RaydzError, status: str = "FAILED") -> None:
    """Give the MLflow run its true status when no worker is left to do it; a failure to do so is only said."""
    uri: Any = config.tracking.mlflow_uri
    if not config.tracking.mlflow or uri is None or isinstance(error, PlacementError):
        return
    try:
        settle_run(uri, config.tracking.experiment, str(config.run.name), status, error.what)
    except Exception as problem:  # telemetry must not hide the error that matters
        _logger.warning("MLflow was not told that the run failed: %s", problem)

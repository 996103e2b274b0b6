"""`raydz.fit`: one Ray Train run whose workers call the training loop, restarted from the newest checkpoint.

Neighbours: `jobs/pretrain.py` calls `fit`; `worker.py` runs on every rank; `preflight.py` fails early; `board.py`
carries results and errors home; `policy.py` decides about restarts; `cluster.py` connects. See README.md, "A restart".
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

from raydz import log
from raydz.config import Config, check_trainable, load, resolve_paths
from raydz.errors import PlacementError, RaydzError, TrainingError
from raydz.orchestrate.board import new_board
from raydz.orchestrate.cluster import check_resources, connect
from raydz.orchestrate.policy import GiveUp, decide
from raydz.orchestrate.preflight import run_preflight
from raydz.orchestrate.worker import WorkerTask, train_worker
from raydz.tracking import settle_run
from raydz.train import Result
from raydz.train.build import LossFunction, ModelFunction

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

    Blocking: until the run is finished, or given up.

    Raises:
        ConfigError, DataError, StorageError, CheckpointError: bad input, before any step; never retried.
        PlacementError: a local cluster is too small.
        TrainingError: more failures than `failure.max_failures`, or training that cannot go on.
    """
    log.setup(0)
    config = resolve_paths(load(config, overrides))
    check_trainable(config)
    config.engine().batch(config.scaling.num_workers)
    print(config.to_yaml(), flush=True)
    is_own_cluster = connect()
    resources = worker_resources(config)
    check_resources(resources, config.scaling.num_workers, can_grow=not is_own_cluster)
    run_preflight(config, resources)
    num_failures = 0
    while True:
        board = new_board()
        task = WorkerTask(config=config, model=model, loss=loss, board=board)
        try:
            _trainer(config, task, resources).fit()
            break
        except Exception as error:
            num_failures += 1
            said = ray.get(board.failure.remote())
            decision = decide(num_failures, config.failure.max_failures, said, _last_line(error))
            if isinstance(decision, GiveUp):
                failure = decision.error or _given_up(config, error, decision)
                _settle(config, failure)
                raise failure from error
            _logger.warning("restarting from the newest checkpoint: %s", decision.reason)
    result = ray.get(board.result.remote())
    if result is None:
        raise TrainingError("the workers ended without a result", where=f"run {config.run.name}")
    return result


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


def _settle(config: Config, error: RaydzError) -> None:
    """Give the MLflow run its true status when no worker is left to do it; a failure to do so is only said."""
    uri: Any = config.tracking.mlflow_uri
    if not config.tracking.mlflow or uri is None or isinstance(error, PlacementError):
        return
    try:
        settle_run(uri, config.tracking.experiment, str(config.run.name), "FAILED", error.what)
    except Exception as problem:  # telemetry must not hide the error that matters
        _logger.warning("MLflow was not told that the run failed: %s", problem)

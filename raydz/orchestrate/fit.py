"""`raydz.fit`: what is checked before a worker starts, the attempts of the run, and how it ends for the caller.

Neighbours: `jobs/pretrain.py` calls `fit`; `cluster.py` connects; `preflight.py` fails early; `attempts.py` starts
worker groups until the run is at its end. See README.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from raydz import log
from raydz.config import Config, check_trainable, load, resolve_paths
from raydz.errors import PlacementError, RaydzError, Superseded, TrainingError
from raydz.orchestrate.attempts import Attempts, GivenUp
from raydz.orchestrate.cluster import check_resources, connect, worker_resources
from raydz.orchestrate.naming import named_by_submission
from raydz.orchestrate.preflight import run_preflight
from raydz.orchestrate.sizing import allowed_sizes
from raydz.orchestrate.stop import StopSignals
from raydz.orchestrate.worker import WorkerTask
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
    allowed_sizes(config)
    print(config.to_yaml(), flush=True)
    is_own_cluster = connect()
    resources = worker_resources(config)
    check_resources(resources, config.scaling.min_workers, can_grow=not is_own_cluster)
    run_preflight(config, resources)
    with StopSignals() as signals:
        try:
            result = Attempts(WorkerTask(config, model, loss, board=None), resources, signals).run()
        except GivenUp as end:
            _settle(config, end.error)
            raise end.error from end.__cause__
        except BaseException as error:
            if signals.number is None or signals.is_urgent:
                raise
            _settle(config, TrainingError("the run was stopped before it could save"), "KILLED")
            raise signals.end() from error
        if result.status == "stopped" and signals.number is not None:
            _settle(config, TrainingError(f"stopped after step {result.step}"), "KILLED")
            print(describe_result(result), flush=True)
            raise signals.end()
    return result


def _settle(config: Config, error: RaydzError, status: str = "FAILED") -> None:
    """Give the MLflow run its true status when no worker is left to do it; a failure to do so is only said."""
    uri: Any = config.tracking.mlflow_uri
    if not config.tracking.mlflow or uri is None or isinstance(error, PlacementError | Superseded):
        return
    try:
        settle_run(uri, config.tracking.experiment, str(config.run.name), status, error.what)
    except Exception as problem:  # telemetry must not hide the error that matters
        _logger.warning("MLflow was not told that the run failed: %s", problem)

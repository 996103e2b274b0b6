"""What can be known before a worker group starts, asked on a worker's host: version, storage, data.

Neighbours: `fit.py` calls `run_preflight`. A group takes many seconds to start and Ray Train would retry it; this
takes a few and fails with the same typed errors. What it prepares (tokens) the workers of that host find ready.
"""

from __future__ import annotations

import ray

from raydz import log
from raydz.config import Config
from raydz.errors import PlacementError, RaydzError
from raydz.version import __version__

_PATIENCE_S = 20.0
_logger = log.get(__name__)


def run_preflight(config: Config, resources: dict[str, float]) -> None:
    """Run the checks in a task with a worker's resources.

    Blocking: until a host with these resources has run them.

    Raises:
        RaydzError: whatever is wrong, as the worker would have said it.
    """
    other = {name: amount for name, amount in resources.items() if name not in ("CPU", "GPU")}
    task = _check.options(
        num_cpus=resources.get("CPU", 0), num_gpus=resources.get("GPU", 0), resources=other,
        scheduling_strategy="DEFAULT",  # else within the placement group of a task that calls `fit`, which is full
    )  # fmt: skip
    asked = task.remote(config, __version__)
    if not ray.wait([asked], timeout=_PATIENCE_S)[0]:
        _logger.info("checking storage and data on a host with %s free: it takes long, or none is free yet", resources)
    error = ray.get(asked)
    if error is not None:
        raise error


@ray.remote(max_retries=1)
def _check(config: Config, driver_version: str) -> RaydzError | None:
    """The first thing that is wrong, returned rather than raised, so that it arrives as it is."""
    log.setup(0, as_json=config.tracking.log_json)
    if driver_version != __version__:
        return PlacementError(
            "the cluster has another raydz than the driver",
            got=f"{__version__} on {ray.util.get_node_ip_address()}",
            wanted=driver_version,
            remedy="install the same version on every node, or keep raydz/ out of the job's working directory",
        )
    from raydz.train.setup import prepare_data, run_store

    try:
        run_store(config).probe_writable()
        prepare_data(config)
    except RaydzError as error:
        return error
    return None

"""The connection to Ray, and whether what is asked for can ever fit.

Neighbours: `fit.py` calls these first.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial

import ray

from raydz import log
from raydz.config import Config
from raydz.errors import PlacementError

_logger = log.get(__name__)

_SETTINGS = {
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",  # else Ray Train prints every worker line twice in a job
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "5",  # a dead peer's group is not worth 30 s
    "RAY_CHDIR_TO_TRIAL_DIR": "0",  # relative paths mean what they mean in the driver
    "RAY_TRAIN_ENABLE_STATE_TRACKING": "1",  # else the dashboard's Train tab stays empty
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "25",  # just above the 20 s after which Ray sees that nodes are gone
}
"""Ray's own variables where raydz wants another default; what the user has set stays."""
_started: set[str] = set()  # addresses of the local clusters that this process has started


def connect() -> bool:
    """Connect to the job's cluster, the one at RAY_ADDRESS, or start a local one; returns whether it was started here.

    Raises:
        PlacementError: an address is given and nothing answers there, or it refuses our credentials.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    if ray.is_initialized():  # by an earlier `fit` of this process, or by the program around it
        return ray.get_runtime_context().gcs_address in _started
    environment = {name: os.environ[name] for name in _SETTINGS}
    address = os.environ.get("RAY_ADDRESS")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        start = partial(ray.init, address=address, runtime_env={"env_vars": environment}, log_to_driver=True)
        if address is None:
            _in_a_lasting_thread(start)
        else:
            start()
    except Exception as error:
        raise PlacementError(
            "no connection to a Ray cluster",
            where=f"RAY_ADDRESS={address}" if address else "a new local cluster",
            got=f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}",
            remedy="check the address with `ray status`, and that RAY_AUTH_MODE is the same on client and cluster",
        ) from error
    if address is None:
        _started.add(ray.get_runtime_context().gcs_address)
    return address is None


def _in_a_lasting_thread(start: Callable[[], object]) -> None:
    """Call it in the main thread, or else in one that lives on: Linux ends Ray's processes with the thread that started
    them, and a thread in which `fit` was called may be over long before the process.
    """
    if threading.current_thread() is threading.main_thread():
        start()
        return
    outcome: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()

    def live() -> None:
        try:
            start()
        except BaseException as error:  # the thread that waits raises it
            outcome.put(error)
            return
        outcome.put(None)
        threading.Event().wait()

    threading.Thread(target=live, name="local-ray", daemon=True).start()
    error = outcome.get()
    if error is not None:
        raise error


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


def check_resources(per_worker: dict[str, float], num_workers: int, *, can_grow: bool) -> None:
    """Refuse what a cluster that cannot grow will never have; say so where nodes may still come.

    Raises:
        PlacementError: names the resource, what all workers need, and what there is.
    """
    present = ray.cluster_resources()
    for name, amount in per_worker.items():
        needed, there = amount * num_workers, present.get(name, 0.0)
        if needed <= there:
            continue
        if can_grow:
            _logger.warning("the cluster has %g %s now and the run needs %g: waiting for nodes", there, name, needed)
            continue
        raise PlacementError(
            "this machine has too little for the workers",
            where="scaling",
            got=f"{there:g} {name}",
            wanted=f"{needed:g} {name} ({num_workers} workers, {amount:g} each)",
            remedy="ask for fewer workers or less for each, or connect to a cluster with RAY_ADDRESS",
        )

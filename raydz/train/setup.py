"""Everything that must be there before the first step, opened in an order that fails early and on all ranks.

Neighbours: `loop.py` trains what this returns; `orchestrate/worker.py` and `__main__.py` call `run_training` there.
Order: storage, data, model and engine, checkpoint, tracking. No step is made before all of it stands.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from raydz import log
from raydz.checkpoint import AfterCommit, Fence, KeyMap, LoadRequest, committed_steps
from raydz.config import Config, SourceConfig, check_trainable
from raydz.data import BatchOrder, PackedRows, PreparedData, SourceSpec, Tokenizer, TokenizerSpec, prepare
from raydz.dist import CommClock, Communicator, World
from raydz.dist.agreement import on_every_rank, on_rank_zero
from raydz.engine import Engine
from raydz.errors import ConfigError, DataError
from raydz.hf import load_initial
from raydz.models import Decoder
from raydz.storage import S3Options, Store, open_store
from raydz.tracking import Tracker, settle_run
from raydz.tracking.events import EVENTS_NAME
from raydz.tracking.journal import read
from raydz.train.attempt import Attempt
from raydz.train.build import LossFunction, ModelFunction, build_model, choose_loss
from raydz.train.exports import RunExports
from raydz.train.feed import Feed
from raydz.train.memory import MemoryCheck, check_memory, naming_out_of_memory
from raydz.train.recovery import RecoveryWatch, watch_recovery
from raydz.train.resume import Start, choose_start, load_manifest
from raydz.train.saving import RunSaves
from raydz.train.snapshots import RunSnapshots, newest_everywhere
from raydz.train.spikes import SpikeWatch
from raydz.train.stopping import StopRequest

_logger = log.get(__name__)


@dataclass
class Run:
    """A run that is ready for its next step.

    Attributes:
        step: the last step that is done.
        tokens_seen: valid tokens trained on so far.
        tracker: on rank 0 only.
        after_commit: called on rank 0, in a save's thread, with the folder of each committed checkpoint.
        saves: while it trains.
        snapshots: while it trains, where the configuration asks for some.
        is_from_memory: it goes on from a snapshot, whose step the store may not have.
        exports: while it trains, on rank 0, where the configuration asks for some.
        mlflow_run_id: what the loaded checkpoint says; once tracking has started, the tracker knows it.
        weaknesses: of the store, for which other stores of the run must make up, too.
        began_at: Unix time at which the checkpoint was loaded.
        recovery: on rank 0, after a failure.
    """

    config: Config
    engine: Engine
    memory: MemoryCheck
    loss: LossFunction
    feed: Feed
    eval_sets: dict[str, PackedRows]
    prepared: PreparedData
    tokenizer: Tokenizer
    store: Store
    start: Start
    run_dir: Path
    tracker: Tracker | None = None
    step: int = 0
    tokens_seen: int = 0
    after_commit: list[AfterCommit] = field(default_factory=list)
    saves: RunSaves | None = None
    snapshots: RunSnapshots | None = None
    is_from_memory: bool = False
    exports: RunExports | None = None
    newest_folder: str | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    spikes: SpikeWatch | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    sample: str | None = None
    mlflow_run_id: str | None = None
    attempt: Attempt = field(default_factory=Attempt)
    weaknesses: list[str] = field(default_factory=list)
    began_at: float = 0.0
    recovery: RecoveryWatch | None = None


def storage_options(config: Config) -> S3Options:
    """How the run reaches S3; credentials stay in the environment."""
    return S3Options(**config.storage.model_dump())


def control_communicator(world: World) -> Communicator:
    """Small messages over the default group, for what must be agreed before an engine exists."""
    group = dist.group.WORLD if world.world_size > 1 else None
    return Communicator(group, ordered=True, clock=CommClock(world.device))


def run_store(config: Config) -> Store:
    """The store of the run's own checkpoints: `<checkpoint.dir>/<run.name>`."""
    root = config.checkpoint.dir or config.run.root
    return open_store(f"{root.rstrip('/')}/{config.run.name}/checkpoints", storage_options(config))


def exports_store(run: Run) -> Store:
    """The store of the run's Hugging Face exports: `<checkpoint.dir>/<run.name>/exports`."""
    config = run.config
    root = config.checkpoint.dir or config.run.root
    store = open_store(f"{root.rstrip('/')}/{config.run.name}/exports", storage_options(config))
    store.make_up_for(run.weaknesses)
    return store


def open_run(
    config: Config, world: World, model: ModelFunction | None, loss: LossFunction | None, attempt: Attempt | None = None
) -> Run:
    """Open storage, data, model, checkpoint and tracking of a resolved configuration.

    Collective: every rank. Raises: a RaydzError, the same on every rank.
    """
    comm = control_communicator(world)
    check_trainable(config)
    attempt = attempt or Attempt()
    store = run_store(config)
    weaknesses = on_rank_zero(comm, store.probe_writable)
    store.make_up_for(weaknesses)
    on_rank_zero(comm, lambda: attempt.prepare(store))
    prepared = on_every_rank(comm, lambda: prepare_data(config))
    batch = config.engine().batch(world.world_size)
    module = on_every_rank(comm, lambda: build_model(config, prepared.vocab_size, model))
    memory = on_every_rank(comm, lambda: check_memory(config, module, world, prepared.vocab_size))
    with naming_out_of_memory(memory, None, "while the engine was built"):
        engine = Engine(
            module, config.engine(), world,
            max_skipped_in_row=config.train.max_skipped_in_row, ema_decay=config.train.ema_decay,
        )  # fmt: skip
    if isinstance(module, Decoder):
        dtype = engine.sharded.precision.compute_dtype
        _logger.info("attention kernel: %s", module.describe_attention(dtype, world.device))
    rows = PackedRows(prepared.train_dir, config.data.sequence_length)
    start, engine.fence = _agree_on_start(config, store, comm)
    run = Run(
        config=config,
        engine=engine,
        memory=memory,
        loss=choose_loss(loss),
        feed=Feed(
            rows,
            BatchOrder(len(rows), batch.global_batch, config.run.seed),
            rank=engine.mesh.shape.batch_rank(world.rank),
            world_size=engine.mesh.shape.batch_world_size,
            micro_batch=batch.micro_batch,
            device=world.device,
        ),
        eval_sets={n: PackedRows(d, config.data.sequence_length) for n, d in prepared.eval_dirs.items()},
        prepared=prepared,
        tokenizer=prepared.tokenizer(),
        store=store,
        start=start,
        run_dir=Path(config.run.root) / str(config.run.name),
        spikes=SpikeWatch(config.train.loss_spike) if config.train.loss_spike else None,
        attempt=attempt,
        weaknesses=weaknesses,
    )
    run.is_from_memory = _load_from_memory(run)
    if not run.is_from_memory:
        _load_from_store(run)
    on_rank_zero(comm, partial(_say_where_it_goes_on, run))
    run.began_at = time.time()
    attempt.began(run.step)
    return run


def prepare_data(config: Config) -> PreparedData:
    """Tokenise the run's sources on this host, or find that it was done before.

    Raises:
        DataError, ConfigError, StorageError: the sources, the tokenizer or the cache are not usable.
    """
    if not config.data.sources:
        raise DataError(
            "no training data", where="data.sources", got="an empty list", wanted="at least one path",
            remedy="for example data.sources=[sample:wordnet]",
        )  # fmt: skip
    tokenizer = config.data.tokenizer
    wanted = config.model.vocab_size
    return prepare(
        [_spec(config, source) for source in config.data.sources],
        {name: [_spec(config, source) for source in sources] for name, sources in config.data.evals.items()},
        config.data.eval_fraction,
        TokenizerSpec(path=tokenizer.path, vocab_size=tokenizer.vocab_size),
        None if wanted == "auto" else wanted,
        config.data.cache_dir or f"{config.run.root}/cache",
    )


def _spec(config: Config, source: SourceConfig) -> SourceSpec:
    return SourceSpec(
        path=source.path, column=source.column, split=source.split,
        endpoint_url=config.storage.endpoint_url, region=config.storage.region,
    )  # fmt: skip


def _agree_on_start(config: Config, store: Store, comm: Communicator) -> tuple[Start, Fence | None]:
    """Where to start, and on rank 0 the fence that keeps older starts of this run from committing after that.

    Nothing is claimed by a configuration that is refused, nor where the run is complete.
    """
    fence: Fence | None = None

    def choose() -> dict[str, Any]:
        nonlocal fence
        before, options = committed_steps(store), storage_options(config)
        start = choose_start(config, store, options)
        if start.step < config.train.steps:
            fence = Fence.claim(store)
            if committed_steps(store) != before:
                start = choose_start(config, store, options)
        return asdict(start)

    return Start(**on_rank_zero(comm, choose)), fence


def _say_where_it_goes_on(run: Run) -> None:
    if run.engine.fence is not None:
        run.engine.fence.began(run.step)


def _load_from_store(run: Run) -> None:
    if not run.start.is_beginning:
        _load(run)
    elif run.config.model.init_from is not None:
        load_initial(run.engine, run.config.model.init_from, storage_options(run.config))


def _load(run: Run) -> None:
    """Load the start's checkpoint into engine, data order and counters. Collective: every rank."""
    comm = run.engine.comms.world
    store, manifest = load_manifest(run.start, storage_options(run.config), comm)
    state = manifest.state
    on_every_rank(comm, lambda: _check_state(run, state))
    request = LoadRequest(key_map=KeyMap.of(run.start.key_map)) if run.start.key_map else None
    run.engine.load_from(store, run.start.folder, manifest, request)
    run.step = manifest.step
    _take_state(run, state)
    if run.start.store_uri == run.store.uri:
        run.newest_folder = run.start.folder
        run.metrics = dict(state["metrics"])
        run.mlflow_run_id = state["mlflow_run_id"]
    _logger.info("resumed from %s/%s at step %d", run.start.store_uri, run.start.folder, run.step)


def _load_from_memory(run: Run) -> bool:
    """Load the newest snapshot that all ranks have in memory; False where there is none. Collective: every rank."""
    snapshots = run.attempt.memory
    if snapshots is None:
        return False
    moment = None if run.attempt.before_step is not None else newest_everywhere(run, snapshots)
    snapshots.forget_all_but(moment)
    if moment is None:
        return False
    state = run.engine.restore(snapshots, moment)
    run.step = moment[0]
    _take_state(run, state)
    run.metrics, run.mlflow_run_id = dict(state["metrics"]), state["mlflow_run_id"]
    if run.start.folder and run.start.store_uri == run.store.uri:
        run.newest_folder = run.start.folder
    _logger.info("resumed from the snapshot of step %d in memory", run.step)
    return True


def _take_state(run: Run, state: dict[str, Any]) -> None:
    run.tokens_seen = state["train"]["tokens_seen"]
    if run.spikes is not None and state["train"].get("spikes"):
        run.spikes.load_state(state["train"]["spikes"])


def _check_state(run: Run, state: dict[str, Any]) -> None:
    if "train" not in state:
        raise ConfigError(
            "a checkpoint without a training run's state", where="resume", got=run.start.store_uri,
            remedy="it was saved by Engine.save_checkpoint; load it with Engine.load_checkpoint",
        )  # fmt: skip
    run.feed.order.check_resume(state["data"])


def mlflow_uri(config: Config) -> str | None:
    """Where the run's MLflow store is; None where tracking is off."""
    if not config.tracking.mlflow:
        return None
    return config.tracking.mlflow_uri or f"sqlite:///{Path(config.run.root).absolute()}/mlflow.db"


def start_tracking(run: Run) -> None:
    """Open the journal and MLflow on rank 0; every rank learns whether it worked."""

    def start() -> None:
        if run.engine.world.rank != 0:
            return
        tracking = run.config.tracking
        run.tracker = Tracker.start(
            run_dir=run.run_dir,
            run_key=str(run.config.run.name),
            run_name=str(run.config.run.name),
            config_text=run.config.to_yaml(),
            params=flat_params(json.loads(run.config.model_dump_json(exclude={"tracking", "scaling", "failure"}))),
            mlflow_uri=mlflow_uri(run.config),
            experiment=tracking.experiment,
            resume_step=run.step,
            attempt=_attempts_before(run.run_dir),
        )

    on_every_rank(run.engine.comms.world, start)
    where = run.engine.comms.world.all_gather_bytes(f"{socket.gethostname()}:{os.getpid()}".encode())
    if run.tracker:
        run.tracker.log_event("plan", run.memory.as_event())
        run.tracker.log_text("plan.txt", run.memory.as_text())
        if run.attempt.interruption is not None:
            times = (run.attempt.entered_at, run.began_at)
            run.recovery = watch_recovery(
                run.tracker, run.run_dir, run.attempt.interruption, run.step, times, run.engine.world.world_size
            )
        run.tracker.log_event("ranks", {"step": run.step, "processes": [place.decode() for place in where]})


def flat_params(nested: dict, prefix: str = "") -> dict[str, str]:
    """`{"a": {"b": 1}}` -> `{"a.b": "1"}`, without what is not set."""
    flat: dict[str, str] = {}
    for key, value in nested.items():
        if isinstance(value, dict):
            flat |= flat_params(value, f"{prefix}{key}.")
        elif value is not None:
            flat[prefix + key] = str(value)
    return flat


def _attempts_before(run_dir: Path) -> int:
    events = run_dir / EVENTS_NAME
    return sum(1 for event in read(events) if event.get("event") == "start") if events.exists() else 0


def settle_tracking(run: Run) -> None:
    """Of a run that was killed after its last checkpoint: end its MLflow run, which still says RUNNING.

    A store that cannot be reached is only said: nothing of the training depends on it.
    """
    uri = mlflow_uri(run.config)
    if uri is None or run.engine.world.rank != 0:
        return
    try:
        settle_run(uri, run.config.tracking.experiment, str(run.config.run.name), "FINISHED")
    except Exception as error:  # MLflow raises errors of its HTTP, SQL and file layers alike
        _logger.warning("MLflow was not told that the run is complete: %s", error)

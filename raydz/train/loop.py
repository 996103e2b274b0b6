"""Training, read from top to bottom: one step, what happens every so often, and how a run ends.

The path: `jobs/pretrain.py` -> `orchestrate.fit` -> here -> `engine.Engine` -> `zero/` -> `dist/` -> `ops/`.
Under Ray the ranks are Ray Train workers; under torchrun and in one process `train/__main__.py` calls the same.
"""

from __future__ import annotations

import random
from contextlib import nullcontext
from typing import Literal

import numpy as np
import torch

from raydz import log
from raydz.checkpoint import checkpoint_uri
from raydz.config import Config
from raydz.dist import World
from raydz.errors import Superseded
from raydz.tracking import read_peaks, reduce_over_ranks
from raydz.train.attempt import Attempt
from raydz.train.build import LossFunction, ModelFunction
from raydz.train.evaluate import evaluate, write_sample
from raydz.train.exports import open_exports
from raydz.train.figures import StepWatch
from raydz.train.keeping import open_keeping
from raydz.train.memory import naming_out_of_memory
from raydz.train.progress import Progress
from raydz.train.result import Result
from raydz.train.saving import RunSaves, ending_on_sigterm, heed_sigterm
from raydz.train.setup import Run, exports_store, mlflow_uri, open_run, settle_tracking, start_tracking
from raydz.train.snapshots import is_saved, open_snapshots
from raydz.train.spikes import commit_or_answer
from raydz.train.stopping import StopRequest, goes_on

_logger = log.get(__name__)


def run_training(
    config: Config,
    world: World,
    *,
    model: ModelFunction | None = None,
    loss: LossFunction | None = None,
    attempt: Attempt | None = None,
) -> Result:
    """Train a run from where it stands to `train.steps`, on this rank.

    Collective: every rank. Blocking: until the run is done.

    Raises:
        RaydzError: bad input, before any step and on every rank; or training that cannot go on.
    """
    run = open_run(config, world, model, loss, attempt)
    run.stop = StopRequest(run.attempt.asked_to_stop)
    if run.step >= config.train.steps:
        settle_tracking(run)
        return _result(run, "complete")
    start_tracking(run)
    run.exports = open_exports(run, exports_store(run))
    open_keeping(run)
    try:
        with ending_on_sigterm(), naming_out_of_memory(run.memory, run.engine, "while training"):
            train(run)
        is_stopped = run.step < config.train.steps
        if run.exports is not None and not is_stopped:
            run.exports.finish()
    except BaseException as error:
        if run.saves is not None:
            run.saves.give_chance()
        if run.exports is not None:
            run.exports.stop()
        if run.tracker and isinstance(error, Superseded):
            run.tracker.pause(error.what, timeout_s=0.0)  # the records are the newer start's now
        elif run.tracker:
            stopped = isinstance(error, KeyboardInterrupt | SystemExit)
            run.tracker.finish("KILLED" if stopped else "FAILED", f"{type(error).__name__}: {error}")
        raise
    if is_stopped:
        return _stopped(run)
    if run.tracker:
        run.tracker.finish("FINISHED")
    return _result(run, "finished")


def train(run: Run) -> None:
    """All steps that are left."""
    config, steps = run.config.train, run.config.train.steps
    flops = getattr(run.engine.module, "flops_per_token", None)
    watch = StepWatch(run.engine, flops(run.config.data.sequence_length) if flops else None)
    if run.tracker:
        run.tracker.log_baseline(read_peaks())
        run.tracker.set_tags({"raydz.unigram_entropy": f"{run.prepared.unigram_entropy:.4f}"})
    with Progress(steps, run.step, config.log_every, is_shown=run.tracker is not None) as progress:
        run.saves = saves = RunSaves(run, progress)
        run.snapshots = open_snapshots(run)
        if run.is_from_memory and is_due(run.step, run.config.checkpoint.every) and not is_saved(run):
            saves.begin()  # the one of this step was lost with the processes that made it
        for step in range(run.step + 1, steps + 1):
            if step in run.attempt.skips:
                _leave_out(run, step)
                if step == steps and run.config.checkpoint.at_end:
                    saves.begin()
                continue
            metrics = train_step(run, step, watch)
            if run.recovery is not None:
                metrics |= run.recovery.step_ended(step)
            if is_due(step, config.eval_every) or (step == steps and config.eval_every):
                with run.engine.averaged() if config.evaluate_ema else nullcontext():
                    metrics |= evaluate(run.engine, run.loss, run.eval_sets, config.eval_rows)
                    _write_sample(run, step, progress)
            run.step, run.metrics = step, run.metrics | metrics
            if run.tracker:
                run.tracker.log_step(step, metrics)
                run.attempt.measured(step, metrics)
            progress.show(step, metrics)
            run.attempt.ended_step(step)
            heed_sigterm()
            saves.poll()
            if run.snapshots is not None:
                run.snapshots.step_ended(step)
            if run.exports is not None:
                run.exports.report()
            at_end = step == steps and run.config.checkpoint.at_end
            if run.stop.is_agreed:
                saves.poll(wait=True)  # a save in flight must not stand in the way of the last one
            if is_due(step, run.config.checkpoint.every) or at_end or run.stop.is_agreed:
                saves.begin()
            if run.stop.is_agreed:
                break
        saves.poll(wait=True)


def train_step(run: Run, step: int, watch: StepWatch) -> dict[str, float]:
    """One optimizer step over this rank's micro-batches; returns its metrics, reduced over ranks."""
    engine = run.engine
    seed_step(run.config.run.seed, step, engine.world.rank)
    watch.start()
    batch = run.feed.batch(step)
    watch.data_arrived()
    loss_sum = 0.0
    for micro_batch in batch.micro_batches:
        loss = run.loss(engine, micro_batch)
        engine.backward(loss, denominator=batch.num_tokens)  # one normaliser for the whole step
        loss_sum += loss.detach().double().item()
        if micro_batch is not batch.micro_batches[-1]:
            engine.step()
    losses = engine.comms.world.all_gather_values([loss_sum, run.stop.word()])
    mean_loss = sum(row[0] for row in losses) / batch.num_tokens
    run.stop.hear(row[1] for row in losses)
    report = commit_or_answer(run, step, mean_loss)
    figures = watch.stop(report, batch.num_own_tokens)
    run.tokens_seen += batch.num_tokens
    if run.saves is not None:
        figures |= run.saves.figures()
    if run.spikes is not None:
        figures["loss_spikes"] = float(run.spikes.count)
    metrics = reduce_over_ranks(figures, engine.comms.world.all_gather_values)
    counts = {"tokens_seen": float(run.tokens_seen), "world_size": float(engine.world.world_size)}
    return {"loss": mean_loss, **metrics, **counts}


def seed_step(seed: int, step: int, rank: int) -> None:
    """Seed every generator from (seed, step, rank): a resumed run draws what an uninterrupted one would."""
    words = np.random.SeedSequence((seed, step, rank)).generate_state(3)
    torch.manual_seed(int(words[0]))
    np.random.seed(int(words[1]))
    random.seed(int(words[2]))


def is_due(step: int, every: int) -> bool:
    """Whether something that happens every so many steps (0: never) happens now."""
    return every > 0 and step % every == 0


def _leave_out(run: Run, step: int) -> None:
    """A step that failed again and again passes without its batch; weights and schedule stay as they are."""
    run.step = step
    _logger.warning("step %d is left out (failure.on_poison)", step)
    if run.tracker:
        run.tracker.log_event("step_left_out", {"step": step})


def _stopped(run: Run) -> Result:
    """The end of a run that was asked to stop; it goes on where this ends."""
    if run.exports is not None:
        run.exports.stop()
    if run.tracker and goes_on(run.stop.reason):
        run.tracker.pause(str(run.stop.reason))
    elif run.tracker:
        run.tracker.finish("KILLED", f"stopped after step {run.step}: {run.stop.reason}")
    return _result(run, "stopped")


def _write_sample(run: Run, step: int, progress: Progress) -> None:
    config = run.config.train
    if config.sample_prompt is None:
        return
    run.sample = write_sample(run.engine, run.tokenizer, config.sample_prompt, config.sample_tokens, seed=step)
    progress.say(f"sample at step {step}: {run.sample}")
    if run.tracker:
        run.tracker.log_event("sample", {"step": step, "text": run.sample})


def _result(run: Run, status: Literal["finished", "complete", "stopped"]) -> Result:
    return Result(
        run_name=str(run.config.run.name),
        run_dir=str(run.run_dir),
        status=status,
        step=run.step,
        total_steps=run.config.train.steps,
        metrics=dict(run.metrics),
        checkpoint_uri=checkpoint_uri(run.store, run.newest_folder) if run.newest_folder else None,
        mlflow_run_id=run.tracker.mlflow_run_id if run.tracker else run.mlflow_run_id,
        mlflow_uri=mlflow_uri(run.config),
        unigram_entropy=run.prepared.unigram_entropy,
        sample=run.sample,
    )

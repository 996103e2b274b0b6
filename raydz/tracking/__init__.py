"""Tracking: what is measured, written first to a local journal, carried from there to MLflow.

    tracker = Tracker.start(run_dir=..., run_key=..., ...)            # rank 0 only
    tracker.log_baseline(read_peaks())
    for step in ...:
        figures = reduce_over_ranks(local_figures, gather)            # every rank
        tracker.log_step(step, figures)                               # rank 0: one local write, never waits
    tracker.finish("FINISHED")

The README of this package is its manual. Importing it imports neither mlflow nor torch.
"""

from raydz.tracking.events import append_event
from raydz.tracking.journal import Journal, read
from raydz.tracking.memory import read_peaks, reset_peaks
from raydz.tracking.metrics import METRICS, Metric, reduce_over_ranks
from raydz.tracking.mlflow import settle_run
from raydz.tracking.tracker import Tracker

__all__ = [
    "METRICS",
    "Journal",
    "Metric",
    "Tracker",
    "append_event",
    "read",
    "read_peaks",
    "reduce_over_ranks",
    "reset_peaks",
    "settle_run",
]

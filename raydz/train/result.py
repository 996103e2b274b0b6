"""What a finished run leaves in the caller's hands."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Result:
    """Returned by `raydz.fit` and `train.run_training`.

    Attributes:
        status: `finished`, `complete` where there was nothing left to do, `stopped` where it was asked to end early.
        metrics: of the last step, and the last `eval_loss` of each set; names as in `raydz.tracking.METRICS`.
        checkpoint_uri: the newest committed checkpoint, for `resume` or `Engine.load_checkpoint`.
        mlflow_run_id, mlflow_uri: None without MLflow.
        run_dir: folder of the journal, on the host of rank 0.
        sample: text the model wrote at the last evaluation.
    """

    run_name: str
    run_dir: str
    status: Literal["finished", "complete", "stopped"]
    step: int
    total_steps: int
    metrics: dict[str, float] = field(default_factory=dict)
    checkpoint_uri: str | None = None
    mlflow_run_id: str | None = None
    mlflow_uri: str | None = None
    unigram_entropy: float | None = None
    sample: str | None = None

"""The last lines a person reads: what a run reached, where it is, and what to type next.

Neighbours: `__main__.py` and `jobs/pretrain.py` print this.
"""

from __future__ import annotations

import sys

from raydz.train.result import Result


def describe_result(result: Result) -> str:
    """Several lines of text."""
    head = {
        "finished": f"run {result.run_name} finished at step {result.step}",
        "complete": f"run {result.run_name} is complete: step {result.step} of {result.total_steps} was reached before",
        "stopped": f"run {result.run_name} was stopped after step {result.step} of {result.total_steps}; the same "
        "command goes on from its newest checkpoint",
    }[result.status]
    lines = ["", head]
    loss = result.metrics.get("eval_loss")
    if loss is not None and result.unigram_entropy is not None:
        gain = result.unigram_entropy - loss
        lines.append(
            f"validation loss {loss:.4f} nats/token; unigram entropy {result.unigram_entropy:.4f}; {gain:.4f} below it"
        )
    if result.sample:
        lines.append(f"sample: {result.sample}")
    lines.append(f"checkpoint: {result.checkpoint_uri or 'none'}")
    lines.append(f"journal: {result.run_dir}/journal.jsonl")
    if result.mlflow_uri:
        lines.append(f"MLflow run: {result.mlflow_run_id or 'the run of this name'} ({result.mlflow_uri})")
        if result.mlflow_uri.startswith("sqlite"):
            command = f"{sys.executable} -m mlflow ui --backend-store-uri {result.mlflow_uri}"
            lines.append(f"open it with: {command}   then http://127.0.0.1:5000")
    if result.status == "complete":
        lines.append("to train it again: --set run.name=another-name")
        lines.append(f"to train it further: --set run.name={result.run_name} --set train.steps=more")
    return "\n".join(lines)

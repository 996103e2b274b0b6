"""A driver as a user would write it: `python -m tests.support.fit_driver OPTIONS.json` calls raydz.fit.

Options: config (dict), loss (name of a function below, or null), result (path for the outcome as JSON).
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path

import raydz


def slow_loss(model, batch):
    """Next-token prediction that takes its time, so that a test can strike in the middle."""
    from raydz.models import causal_lm_loss

    time.sleep(0.15)
    return causal_lm_loss(model, batch)


def broken_loss(model, batch):
    """A plain bug on rank 1."""
    from raydz.models import causal_lm_loss

    if os.environ["RANK"] == "1":
        raise ZeroDivisionError("a bug in the user's loss")
    return causal_lm_loss(model, batch)


def poisoned_loss(model, batch):
    """A plain bug on rank 1 whenever it meets the batch of step 7."""
    import numpy as np
    import torch

    rank = int(os.environ["RANK"])
    seed_of_step_7 = int(np.random.SeedSequence((model.config.seed, 7, rank)).generate_state(3)[0])
    if rank == 1 and torch.initial_seed() == seed_of_step_7:
        raise ZeroDivisionError("a row that breaks the user's loss")
    return slow_loss(model, batch)


def stumbling_loss(model, batch):
    """A plain exception on rank 1 in the first run of step 7 alone; its mark is a file."""
    import numpy as np
    import torch

    rank, mark = int(os.environ["RANK"]), Path(os.environ["RAYDZ_TEST_MARKS"]) / "stumbled"
    seed_of_step_7 = int(np.random.SeedSequence((model.config.seed, 7, rank)).generate_state(3)[0])
    if rank == 1 and torch.initial_seed() == seed_of_step_7 and not mark.exists():
        mark.touch()
        raise ZeroDivisionError("a bug that shows once")
    return slow_loss(model, batch)


def hopeless_loss(model, batch):
    """A typed error on rank 1 that no restart mends."""
    from raydz.models import causal_lm_loss

    if os.environ["RANK"] == "1":
        raise raydz.DataError("a row that cannot be used", where="rank 1", remedy="remove it")
    return causal_lm_loss(model, batch)


def build_model(config):
    """People's own module: a token's embedding predicts the next token."""
    import torch

    class Bigram(torch.nn.Module):
        def __init__(self, vocab_size: int) -> None:
            super().__init__()
            self.embedding = torch.nn.Embedding(vocab_size, 16)
            self.head = torch.nn.Linear(16, vocab_size)

        def forward(self, input_ids):
            return self.head(self.embedding(input_ids))

    return Bigram(config.data.tokenizer.vocab_size)


def own_loss(model, batch):
    """The loss that goes with it: a sum over valid tokens."""
    import torch.nn.functional as F

    logits = model(batch["input_ids"]).flatten(0, 1)
    return F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100, reduction="sum")


def main() -> int:
    options = json.loads(Path(sys.argv[1]).read_text())
    functions = globals()
    model, loss = (functions[options[key]] if options.get(key) else None for key in ("model", "loss"))
    try:
        result = raydz.fit(options["config"], model=model, loss=loss)
    except raydz.RaydzError as error:
        outcome = {"error": type(error).__name__, "text": str(error)}
        Path(options["result"]).write_text(json.dumps(outcome))
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    Path(options["result"]).write_text(json.dumps(asdict(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

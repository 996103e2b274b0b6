"""Evaluation sets, and the text a model writes: nothing here changes what training does next.

Neighbours: `loop.py` calls both every `train.eval_every` steps, on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import torch

from raydz.data import HELDOUT, PackedRows, Tokenizer, split
from raydz.dist.monitor import progressed
from raydz.engine import Engine
from raydz.train.build import LossFunction
from raydz.train.feed import to_tensors


@torch.no_grad()
def evaluate(engine: Engine, loss: LossFunction, sets: Mapping[str, PackedRows], num_rows: int) -> dict[str, float]:
    """Mean loss (nats per valid token) over the first `num_rows` rows of each set, under its metric name.

    Collective: every rank; each takes a share of the rows.
    """
    engine.eval()
    try:
        return {metric_name(name): _mean_loss(engine, loss, rows, num_rows) for name, rows in sets.items()}
    finally:
        engine.train()


def metric_name(set_name: str) -> str:
    """`eval_loss` for the held-out part of the training documents, `eval_loss/<name>` for others."""
    return "eval_loss" if set_name == HELDOUT else f"eval_loss/{set_name}"


def _mean_loss(engine: Engine, loss: LossFunction, rows: PackedRows, num_rows: int) -> float:
    indices = np.arange(min(num_rows, len(rows)), dtype=np.int64)
    shape = engine.mesh.shape
    parts = split(indices, shape.batch_rank(engine.world.rank), shape.batch_world_size, engine.batch.micro_batch)
    total = 0.0
    for part in parts:
        total += float(loss(engine, to_tensors(rows, part, engine.world.device)))
        progressed()
    totals = engine.comms.world.all_gather_values([total])
    num_tokens = int(rows.num_valid_tokens(indices).sum())
    return sum(row[0] for row in totals) / num_tokens if num_tokens else math.nan


@torch.no_grad()
def write_sample(engine: Engine, tokenizer: Tokenizer, prompt: str, num_tokens: int, seed: int) -> str:
    """Let the model continue `prompt` by sampling at temperature 0.8; the same text for the same weights and seed.

    The whole prefix is computed again for every token: this is a glimpse, not a generation engine.

    Collective: every rank computes the same, because parameters may have to be gathered.
    """
    engine.eval()
    generator = torch.Generator().manual_seed(seed)
    ids = [tokenizer.eos_id, *map(int, tokenizer.encode(prompt))]
    try:
        for _ in range(num_tokens):
            logits = engine(torch.tensor([ids], device=engine.world.device))[0, -1]
            chances = torch.softmax(logits.float().cpu() / 0.8, -1)
            ids.append(int(torch.multinomial(chances, 1, generator=generator)))
            progressed()
    finally:
        engine.train()
    return tokenizer.decode(ids)

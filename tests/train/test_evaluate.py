"""Evaluation and samples: exact over uneven ranks, and without a trace in training."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.checkpoint.states import assert_same_bits, stored_tensors
from tests.train.runs import column, journal, run, run_config, run_on_rank, write_text
from tests.train.test_resume import Dropping

LOOKING = {"eval_every": 1, "sample_prompt": "red house", "sample_tokens": 3}


@pytest.mark.parametrize("looking", [{"eval_every": 1}, LOOKING])
def test_evaluation_and_samples_change_no_bit_of_training(ranks, tmp_path, looking):
    for name, train in (("quiet", {}), ("looking", looking)):
        config = run_config(tmp_path, run={"name": name}, train=train, zero_optimization={"stage": 3})
        ranks(2).run(run_on_rank, config, {"model": Dropping})
    assert column(tmp_path, "loss", "looking") == column(tmp_path, "loss", "quiet")
    ends = [stored_tensors(tmp_path / f"runs/{n}/checkpoints/step-0000000006") for n in ("looking", "quiet")]
    assert_same_bits(*ends)
    evals = column(tmp_path, "eval_loss", "looking")
    assert len(set(evals)) > 3 and column(tmp_path, "eval_loss", "quiet") == [None] * 6


def test_uneven_rows_give_the_same_loss_on_any_number_of_ranks(ranks, tmp_path):
    """Oracle: the mean over all labels of the first rows, by numpy's log-softmax over one forward."""
    write_text(tmp_path / "other.txt", 13)
    sections = {
        "train": {"steps": 1, "eval_every": 1, "eval_rows": 5},
        "data": {"evals": {"other": str(tmp_path / "other.txt")}},
        "optimizer": {"params": {"lr": 0.0}},
        "scheduler": None,
    }
    found = {}
    for world_size in (1, 2, 3):
        name = f"w{world_size}"
        ranks(world_size).run(run_on_rank, run_config(tmp_path, run={"name": name}, **sections))
        found[name] = (column(tmp_path, "eval_loss", name)[0], column(tmp_path, "eval_loss/other", name)[0])
    assert found["w2"] == pytest.approx(found["w1"], abs=1e-5)
    assert found["w3"] == pytest.approx(found["w1"], abs=1e-5)
    assert found["w1"] == pytest.approx(expected_losses(tmp_path, run_config(tmp_path, **sections)), abs=1e-5)
    assert found["w1"][0] != found["w1"][1]


def expected_losses(folder, config) -> tuple[float, float]:
    from raydz.config import load
    from raydz.data import PackedRows
    from raydz.models import Decoder
    from raydz.train.build import decoder_shape

    model = Decoder(decoder_shape(load(config), 300))
    stored = stored_tensors(folder / "runs/w1/checkpoints")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(stored["weight", name]).view_as(parameter))
    losses = []
    for name in ("heldout", "other"):
        (place,) = (folder / "runs/cache").glob(f"*/eval/{name}")
        rows = PackedRows(place, 32)
        batch = {k: torch.from_numpy(v).long() for k, v in rows.rows(np.arange(min(5, len(rows)))).items()}
        labels = batch.pop("labels")
        with torch.no_grad():
            logits = model(batch.pop("input_ids"), **batch)
        losses.append(float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)))
    return tuple(losses)


def test_fewer_rows_than_ranks_are_evaluated_without_a_hang(ranks, tmp_path):
    sections = {"train": {"steps": 1, "eval_every": 1, "eval_rows": 1}, "zero_optimization": {"stage": 3}}
    ranks(3).run(run_on_rank, run_config(tmp_path, **sections), limit_s=60)
    run(run_config(tmp_path, run={"name": "b"}, **sections))
    assert column(tmp_path, "eval_loss") == pytest.approx(column(tmp_path, "eval_loss", "b"), abs=1e-5)


def test_sample_continues_the_prompt_and_is_kept(tmp_path):
    result = run(run_config(tmp_path, train={"steps": 2, "eval_every": 2, **LOOKING}))
    assert result.sample.startswith("red house") and len(result.sample) > len("red house")
    events = (tmp_path / "runs/a/events.jsonl").read_text()
    assert events.count('"sample"') == 2 and journal(tmp_path)[-1]["eval_loss"] > 0


def test_same_weights_write_the_same_sample_on_any_number_of_ranks(ranks, tmp_path):
    sections = {"train": {"steps": 1, **LOOKING, "sample_tokens": 8}, "optimizer": {"params": {"lr": 0.0}}}
    alone = run(run_config(tmp_path, **sections)).sample
    config = run_config(tmp_path, run={"name": "b"}, zero_optimization={"stage": 3}, **sections)
    assert {result.sample for result in ranks(2).run(run_on_rank, config)} == {alone}

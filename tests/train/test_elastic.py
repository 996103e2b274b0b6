"""A run that goes on with other numbers of ranks, which do not divide its batch, trains what one rank would have."""

from __future__ import annotations

import pytest

from tests.train.runs import column, run, run_config, run_on_rank
from tests.train.test_stopping import AskedAfter

ROWS = 7
"""Two ranks take 4 and 3, three take 3, 2 and 2."""


def elastic_config(folder, **sections):
    workers = {"scaling": {"num_workers": [1, 3]}, "train_batch_size": ROWS}
    return run_config(folder, train={"steps": 9, "eval_every": 0}, **workers, **sections)


def run_until(rank: int, world_size: int, config: dict, step: int):
    """Train up to `step` (0: to the end), as before a resize."""
    from raydz.train.attempt import Attempt

    asked = AskedAfter(step, reason="resize: other workers")
    return run_on_rank(rank, world_size, config, {"attempt": Attempt(asked_to_stop=asked) if step else None})


@pytest.mark.parametrize("micro", [{}, {"train_micro_batch_size_per_gpu": 2}], ids=["micro of the most", "given"])
def test_a_run_on_two_then_three_ranks_then_one_equals_one_rank(ranks, tmp_path, micro):
    straight = run_config(
        tmp_path, run={"name": "straight"}, train={"steps": 9, "eval_every": 0}, train_batch_size=ROWS
    )  # one micro-batch of all rows: nothing is cut
    assert run(straight).step == 9
    config = elastic_config(tmp_path, zero_optimization={"stage": 3}, **micro)
    assert {result.step for result in ranks(2).run(run_until, config, 3)} == {3}
    assert {result.step for result in ranks(3).run(run_until, config, 3)} == {6}
    assert run(config).status == "finished"
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "straight"), rel=1e-6)
    for name in ("lr", "tokens_seen"):
        assert column(tmp_path, name) == column(tmp_path, name, "straight")
    sizes = column(tmp_path, "world_size")
    assert list(sizes.values() if isinstance(sizes, dict) else sizes) == [2, 2, 2, 3, 3, 3, 1, 1, 1]


def test_steps_before_the_first_resize_are_those_of_the_same_ranks_bit_for_bit(ranks, tmp_path):
    whole = elastic_config(tmp_path, run={"name": "whole"})
    ranks(2).run(run_until, whole, 0)
    config = elastic_config(tmp_path)
    ranks(2).run(run_until, config, 4)
    ranks(2).run(run_until, config, 0)
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "whole"), "stopped and gone on with the same number"

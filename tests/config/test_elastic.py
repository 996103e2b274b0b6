"""`scaling.num_workers` as a range: the batch of a step stays, its cut follows the number of ranks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.config import BatchSize, load
from raydz.data.order import split
from raydz.errors import ConfigError


def elastic(**sections):
    return load({"scaling": {"num_workers": [1, 4]}, **sections})


@given(st.integers(1, 40), st.none() | st.integers(1, 9), st.integers(1, 6), st.integers(0, 3))
def test_every_number_of_ranks_takes_all_rows_once_in_as_many_micro_batches(rows, micro, least, more) -> None:
    sizes = {"train_batch_size": rows} | ({"train_micro_batch_size_per_gpu": micro} if micro else {})
    config = load({"scaling": {"num_workers": [least, least + more]}, **sizes})
    for ranks in range(least, least + more + 1):
        batch = config.engine().batch(ranks)
        assert batch == config.batch(ranks)
        assert (batch.global_batch, batch.micro_batch) == (rows, micro or -(-rows // (least + more)))
        cut = [split(np.arange(rows), rank, ranks, batch.micro_batch) for rank in range(ranks)]
        assert {len(parts) for parts in cut} == {batch.accumulation}
        assert sorted(np.concatenate([part for parts in cut for part in parts])) == list(range(rows))


def test_a_micro_batch_that_is_not_given_is_that_of_the_most_workers() -> None:
    config = elastic(train_batch_size=16)
    assert [config.batch(ranks) for ranks in (4, 2, 1)] == [
        BatchSize(16, 4, 1), BatchSize(16, 4, 2), BatchSize(16, 4, 4),
    ]  # fmt: skip


def test_a_number_of_workers_still_wants_sizes_that_close() -> None:
    config = load({"scaling": {"num_workers": 3}, "train_batch_size": 16})
    with pytest.raises(ConfigError, match="does not divide"):
        config.batch(3)


def test_a_batch_per_gpu_is_told_what_to_set() -> None:
    with pytest.raises(ConfigError) as caught:
        elastic(train_micro_batch_size_per_gpu=2, gradient_accumulation_steps=3)
    text = str(caught.value)
    assert "train_batch_size: scaling.num_workers is a range" in text and "4 workers would have 24" in text
    assert "gradient_accumulation_steps: scaling.num_workers is a range" in text
    with pytest.raises(ConfigError) as caught:
        elastic()
    assert caught.value.where.startswith("train_batch_size")


@pytest.mark.parametrize("value", [[2, 1], [1], [1, 2, 3], [0, 2], ["1", "2"], [1, "auto"], "1-2", [1.5, 2]])
def test_a_range_is_two_whole_numbers_in_order(value) -> None:
    with pytest.raises(ConfigError) as caught:
        load({"scaling": {"num_workers": value}, "train_batch_size": 8})
    assert "scaling.num_workers" in str(caught.value)


def test_a_range_reads_back_from_the_resolved_text_and_from_an_override(write) -> None:
    config = load({"train_batch_size": 8}, ["scaling.num_workers=[1, 3]"])
    assert (config.scaling.min_workers, config.scaling.max_workers, config.scaling.is_elastic) == (1, 3, True)
    again = load(write("again.yaml", config.to_yaml()))
    assert again.scaling == config.scaling and again.batch(3) == config.batch(3)


def test_the_workers_are_no_part_of_the_run_s_identity() -> None:
    names = {load({"train_batch_size": 12, "scaling": {"num_workers": workers}}).run.name for workers in (1, 4, [1, 4])}
    assert len(names) == 1

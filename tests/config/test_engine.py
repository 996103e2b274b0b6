"""DeepSpeed's sections as models, and the engine's part of a run."""

from __future__ import annotations

import pytest

from raydz.config import load, load_engine
from raydz.errors import ConfigError


@pytest.mark.parametrize("bad", [True, "5", 2.5, 0, -1, [1]])
def test_a_batch_size_is_a_positive_whole_number(bad):
    with pytest.raises(ConfigError) as caught:
        load_engine({"train_batch_size": bad})
    assert "train_batch_size" in caught.value.where


def test_counts_may_be_written_as_floats():
    assert (
        load_engine({"zero_optimization": {"reduce_bucket_size": 5e8}}).zero_optimization.reduce_bucket_size
        == 5 * 10**8
    )


def test_adam_decays_as_adamw_unless_told_otherwise():
    def decoupled(kind: str, **params: bool) -> bool:
        return load_engine({"optimizer": {"type": kind, "params": params}}).optimizer.is_decoupled

    assert decoupled("AdamW") and decoupled("Adam") and not decoupled("Adam", adam_w_mode=False)


def test_schedule_without_an_end_takes_the_length_of_the_run():
    scheduler = {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 2}}
    config = load({"scheduler": scheduler, "train": {"steps": 33}})
    assert config.engine().scheduler.params.total_num_steps == 33
    with pytest.raises(ConfigError) as caught:
        load_engine({"scheduler": scheduler})
    assert "scheduler.params.total_num_steps" in caught.value.where
    kept = load({"scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 5, "warmup_num_steps": 1}}})
    assert kept.engine().scheduler.params.total_num_steps == 5


@pytest.mark.parametrize("empty", [None, {"type": None}, {"type": None, "params": {}}])
def test_null_scheduler_is_none(empty):
    assert load_engine({"scheduler": empty}).scheduler is None


def test_warmup_that_never_ends_is_warned_about(warned):
    load({"scheduler": {"type": "WarmupDecayLR"}, "train": {"steps": 100}})
    assert "warmup_num_steps 1000" in warned() and "100" in warned()


def test_engine_part_of_a_run_equals_the_same_deepspeed_file():
    sections = {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {"params": {"lr": 0.5}}}
    run = load({**sections, "run": {"seed": 7}, "train": {"steps": 5}, "parallel": {"units": ["layers.*"]}})
    assert run.engine() == load_engine({**sections, "seed": 7, "parallel": {"units": ["layers.*"]}})


def test_loaded_engine_configuration_is_returned_as_it_is():
    run = load({"train_batch_size": 8})
    assert load_engine(run) == run.engine()
    assert load_engine(run.engine()) == run.engine()


def test_fp16_and_bf16_choose_the_compute_dtype():
    assert load_engine({}).compute_dtype == "fp32"
    assert load_engine({"fp16": {"enabled": True}}).compute_dtype == "fp16"
    assert load_engine({"bf16": {"enabled": True}}).compute_dtype == "bf16"
    with pytest.raises(ConfigError, match="both enabled"):
        load_engine({"bf16": {"enabled": True}, "fp16": {"enabled": True}})


@pytest.mark.parametrize("budget", [0.5, 1.0, "64GiB", 8e9, 64_000_000_000])
def test_a_host_memory_budget_is_a_fraction_or_a_size(budget):
    assert load_engine({"parallel": {"host_memory_budget": budget}}).parallel.host_memory_budget == budget


@pytest.mark.parametrize("budget", [True, -1, 0, "half", "0.5", [1]])
def test_another_host_memory_budget_is_refused_with_its_path(budget):
    with pytest.raises(ConfigError) as caught:
        load_engine({"parallel": {"host_memory_budget": budget}})
    assert "parallel.host_memory_budget" in str(caught.value) and "64GiB" in str(caught.value)

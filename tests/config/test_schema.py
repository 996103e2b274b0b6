"""raydz's own sections."""

from __future__ import annotations

import pickle

import pydantic
import pytest

from raydz.config import load
from raydz.errors import ConfigError


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ({"hidden_size": 100, "num_attention_heads": 3}, "model.num_attention_heads"),
        ({"hidden_size": 12, "num_attention_heads": 4}, "model.num_attention_heads"),
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "model.num_key_value_heads"),
        ({"max_position_embeddings": 64}, "model.max_position_embeddings"),
    ],
)
def test_sizes_of_the_model_must_fit_together(model, path):
    with pytest.raises(ConfigError) as caught:
        load({"model": model, "data": {"sequence_length": 128}})
    assert path in caught.value.where


def test_a_plain_string_is_a_source():
    config = load({"data": {"sources": ["a.txt", {"path": "b.parquet", "column": "body"}], "evals": {"dev": "c.txt"}}})
    assert [(source.path, source.column) for source in config.data.sources] == [
        ("a.txt", "text"),
        ("b.parquet", "body"),
    ]
    assert [source.path for source in config.data.evals["dev"]] == ["c.txt"]


@pytest.mark.parametrize("name", ["", "../x", "a/b", "a b", ".hidden", "x" * 200])
def test_name_of_a_run_must_be_a_folder_name(name):
    with pytest.raises(ConfigError) as caught:
        load({"run": {"name": name}})
    assert "run.name" in caught.value.where


def test_root_of_runs_must_be_local():
    with pytest.raises(ConfigError, match="local folder") as caught:
        load({"run": {"root": "s3://bucket/runs"}})
    assert "checkpoint.dir" in caught.value.remedy


def test_evaluation_needs_something_to_evaluate_on():
    data = {"sources": ["a.txt"], "eval_fraction": 0}
    with pytest.raises(ConfigError, match="nothing to evaluate"):
        load({"data": data})
    assert load({"data": data, "train": {"eval_every": 0}}).train.eval_every == 0


def test_configuration_is_frozen_and_survives_pickling():
    config = load({"train": {"steps": 3}, "resume": "never"})
    with pytest.raises(pydantic.ValidationError):
        config.train.steps = 4
    copy = pickle.loads(pickle.dumps(config))
    assert copy.model_dump() == config.model_dump()
    assert load(copy, ["train.steps=5"]).train.steps == 5


def test_empty_sections_are_those_that_are_left_out(write):
    path = write("demo.yaml", "train:\n  # steps: 3\noptimizer:\nbf16:\ndata:\n  tokenizer:\n  evals:\n")
    assert load(path).model_dump(exclude={"run"}) == load({}).model_dump(exclude={"run"})


@pytest.mark.parametrize("section", ["model", "parallel"])
@pytest.mark.parametrize(
    ("given", "mode"), [(True, "full"), (False, "none"), ("selective", "selective"), ("none", "none")]
)
def test_activation_checkpointing_is_a_switch_or_a_mode(section, given, mode):
    assert getattr(load({section: {"activation_checkpointing": given}}), section).activation_checkpointing == mode


@pytest.mark.parametrize("given", ["all", 1, 2])
def test_other_activation_checkpointing_is_refused(given):
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        load({"model": {"activation_checkpointing": given}})

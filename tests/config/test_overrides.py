"""Dotted overrides are read as YAML and checked like any other value."""

from __future__ import annotations

import pytest

from raydz.config import load
from raydz.errors import ConfigError


def test_overrides_are_yaml_values_at_dotted_paths():
    config = load(
        {"train": {"steps": 10}},
        [
            "train.steps=20",
            "zero_optimization.stage=2",
            "zero_optimization.reduce_bucket_size=5e7",
            "optimizer.params={lr: 1e-4, betas: [0.9, 0.95]}",
            "bf16.enabled=true",
            "train.sample_prompt=a = b",
            "data.sources=[x.txt, y.txt]",
            "data.sources.1=z.txt",
        ],
    )
    assert (config.train.steps, config.zero_optimization.stage) == (20, 2)
    assert config.zero_optimization.reduce_bucket_size == 50_000_000
    assert (config.optimizer.params.lr, config.optimizer.params.betas) == (1e-4, (0.9, 0.95))
    assert config.bf16.enabled and config.train.sample_prompt == "a = b"
    assert [source.path for source in config.data.sources] == ["x.txt", "z.txt"]


def test_override_reaches_sections_written_in_an_old_spelling():
    given = {"zero_optimization": True, "bfloat16": {"enabled": False}}
    config = load(
        given, ["zero_optimization.overlap_comm=true", "bf16.enabled=true", "deepspeed.bfloat16.enabled=true"]
    )
    assert config.zero_optimization.stage == 1 and config.zero_optimization.overlap_comm
    assert config.bf16.enabled


def test_override_on_a_config_derives_again_what_follows_from_it():
    first = load({"model": {"hidden_size": 192}, "optimizer": {"params": {"lr": 0.1}}})
    second = load(first, ["model.hidden_size=384"])
    assert (first.model.intermediate_size, second.model.intermediate_size) == (512, 1024)
    assert second.optimizer.params.lr == 0.1
    assert first.run.name != second.run.name


def test_override_of_the_deepspeed_file_is_applied_before_it_is_read(write, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "other.json").write_text('{"zero_optimization": {"stage": 3}}')
    monkeypatch.chdir(elsewhere)  # what is typed is relative to where it is typed
    config = load(
        write("run.yaml", "deepspeed: unread.json"), ["zero_optimization.overlap_comm=false", "deepspeed=other.json"]
    )
    assert config.zero_optimization.stage == 3 and config.zero_optimization.overlap_comm is False


def test_unknown_override_suggests_the_closest_key():
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load({}, ["train.step=3"])
    assert "train.step" in caught.value.where and "steps" in caught.value.remedy


@pytest.mark.parametrize("override", ["train.steps", "train..steps=1", "=1"])
def test_override_without_key_or_value_is_refused(override):
    with pytest.raises(ConfigError, match="not understood"):
        load({}, [override])


def test_override_through_a_value_is_refused():
    with pytest.raises(ConfigError, match="leads through train"):
        load({"train": {"steps": 3}}, ["train.steps.more=1"])
    with pytest.raises(ConfigError, match="no such item"):
        load({"data": {"sources": ["a"]}}, ["data.sources.1=b"])


def test_overrides_do_not_touch_the_mapping_they_are_applied_to():
    given = {"train": {"steps": 3}}
    load(given, ["train.steps=4"])
    assert given == {"train": {"steps": 3}}

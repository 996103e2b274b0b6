"""Every fault at once, each with its path; unknown keys with the closest one."""

from __future__ import annotations

import pickle

import pytest

from raydz.config import load, load_engine
from raydz.errors import ConfigError


@pytest.mark.parametrize(
    ("given", "path", "suggestion"),
    [
        ({"trian": {}}, "trian", "train"),
        ({"train": {"step": 1}}, "train.step", "steps"),
        ({"data": {"tokenizer": {"vocabsize": 1}}}, "data.tokenizer.vocabsize", "vocab_size"),
        ({"data": {"sources": [{"path": "a", "colum": "x"}]}}, "data.sources.0.colum", "column"),
        ({"data": {"evals": {"dev": [{"path": "a", "colum": "x"}]}}}, "data.evals.dev.0.colum", "column"),
        ({"zero_optimization": {"stge": 3}}, "zero_optimization.stge", "stage"),
        (
            {"zero_optimization": {"offload_param": {"devise": "cpu"}}},
            "zero_optimization.offload_param.devise",
            "device",
        ),
        (
            {"scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 1}}},
            "scheduler.params.warmup_steps",
            "warmup_num_steps",
        ),
        ({"flops_profilr": {}}, "flops_profilr", "flops_profiler"),
    ],
)
def test_unknown_key_comes_with_the_closest_known_one_at_any_depth(given, path, suggestion):
    with pytest.raises(ConfigError, match="unknown key") as caught:
        load(given)
    assert caught.value.where.startswith(f"{path} ")
    assert f"did you mean {suggestion}?" in caught.value.remedy


def test_key_in_the_wrong_section_is_told_where_it_belongs():
    with pytest.raises(ConfigError) as caught:
        load({"lr": 1e-3})
    assert "optimizer.params.lr" in caught.value.remedy


def test_all_faults_are_reported_at_once():
    given = {
        "model": {"num_attention_heads": 5, "num_key_value_heads": 2},
        "train": {"steps": "many", "threads": 1.5, "lgo_every": 1},
        "zero_optimization": {"stage": 4, "mics_hierarchical_params_gather": True},
        "optimizer": {"type": "Lamb", "params": {"freeze_step": 3}},
        "fp16": {"enabled": True, "hysteresis": 0},
        "scaling": {"num_workers": 0},
        "gradient_clipping": True,
    }
    with pytest.raises(ConfigError) as caught:
        load(given)
    text = str(caught.value)
    expected = [
        "model.num_attention_heads: heads do not divide",
        "model.num_key_value_heads: heads do not share",
        "train.steps: wrong value (got 'many', wanted a whole number)",
        "train.threads: wrong value (got 1.5, wanted a whole number or 'auto')",
        "train.lgo_every: unknown key; did you mean log_every?",
        "zero_optimization.stage: wrong value (got 4, wanted at most 3)",
        "zero_optimization.mics_hierarchical_params_gather: raydz does not do this",
        "optimizer.type: raydz does not have this type (got 'Lamb')",
        "fp16.hysteresis: wrong value (got 0, wanted more than 0)",
        "scaling.num_workers: wrong value (got 0, wanted more than 0 or a pair)",
        "gradient_clipping: wrong value (got True, wanted a number)",
    ]
    assert [fault for fault in expected if fault not in text] == []
    assert f"{len(expected)} faults" in text


def test_a_single_fault_fills_the_fields_of_the_error(write):
    path = write("demo.yaml", "train: {steps: 0}")
    with pytest.raises(ConfigError) as caught:
        load(path)
    error = caught.value
    assert (error.got, error.wanted) == ("0", "more than 0")
    assert "train.steps" in error.where and "demo.yaml" in error.where
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("given", [{"train": 3}, {"zero_optimization": [1]}, {"optimizer": "AdamW"}])
def test_a_section_must_be_a_section(given):
    with pytest.raises(ConfigError) as caught:
        load(given)
    assert "section" in caught.value.wanted


def test_missing_type_of_a_scheduler_is_named():
    with pytest.raises(ConfigError, match="required key") as caught:
        load({"scheduler": {"params": {"warmup_num_steps": 1}}})
    assert "scheduler.type" in caught.value.where


def test_sections_of_a_run_are_pointed_out_to_the_engine():
    with pytest.raises(ConfigError, match="section of a run") as caught:
        load_engine({"train": {"steps": 1}, "zero_optimization": {"stage": 1}})
    assert "train" in caught.value.where

"""What becomes of DeepSpeed's keys: honoured, without effect and warned about, refused with the reason."""

from __future__ import annotations

import pytest

from raydz.config import check_trainable, load, load_engine
from raydz.errors import ConfigError


def test_key_without_effect_is_warned_about_by_name_with_the_reason(warned):
    load_engine({"flops_profiler": {"enabled": True}, "zero_optimization": {"round_robin_gradients": True}})
    assert "flops_profiler has no effect here: model FLOP utilisation" in warned()
    assert "zero_optimization.round_robin_gradients has no effect here" in warned()


def test_keys_that_ask_for_nothing_are_silent(warned):
    load_engine(
        {
            "fp16": {"enabled": False, "loss_scale": 0, "hysteresis": 2},
            "wandb": {"enabled": False, "project": "x"},
            "eigenvalue": {"enabled": False},
            "zero_optimization": {"contiguous_gradients": True, "sub_group_size": 1e9, "zenflow": None},
            "data_types": {"grad_accum_dtype": "fp32"},
        }
    )
    assert warned() == ""


def test_configuration_of_the_hugging_face_trainer_loads_with_auto_everywhere(warned):
    engine = load_engine(
        {
            "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
            "bf16": {"enabled": "auto"},
            "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
            "scheduler": {"type": "WarmupLR", "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr"), "auto")},
            "zero_optimization": {
                "stage": 3,
                "reduce_bucket_size": "auto",
                "stage3_prefetch_bucket_size": "auto",
                "stage3_param_persistence_threshold": "auto",
                "stage3_max_live_parameters": 1e9,
            },
            "gradient_accumulation_steps": "auto",
            "gradient_clipping": "auto",
            "train_batch_size": "auto",
            "train_micro_batch_size_per_gpu": "auto",
            "wall_clock_breakdown": False,
        }
    )
    assert engine.optimizer.params.lr == 1e-3 and engine.gradient_clipping == 1.0
    assert engine.scheduler.params.warmup_max_lr is None
    assert engine.zero_optimization.reduce_bucket_size is None and engine.train_batch_size is None
    assert not engine.bf16.enabled and warned() == ""


def test_old_spellings_mean_the_new_ones():
    assert load_engine({"zero_optimization": True}).zero_optimization.stage == 1
    assert load_engine({"zero_optimization": False}).zero_optimization.stage == 0
    assert load_engine({"bfloat16": {"enabled": True}}).compute_dtype == "bf16"
    assert load_engine({"optimizer": {"type": "adamw"}}).optimizer.type == "AdamW"
    assert load_engine({"communication_data_type": "bfloat16"}).communication_data_type == "bf16"
    zero = load_engine(
        {"zero_optimization": {"stage": 2, "cpu_offload": True, "cpu_offload_use_pin_memory": False}}
    ).zero_optimization
    assert zero.offload_optimizer.device == "cpu" and not zero.offload_optimizer.pin_memory


def test_old_and_new_spelling_together_are_refused():
    with pytest.raises(ConfigError, match="same key"):
        load_engine({"bf16": {"enabled": True}, "bfloat16": {"enabled": False}})


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}}, "fp16.fp16_master_weights_and_grads"),
        ({"amp": {"enabled": True}}, "amp"),
        ({"sequence_parallel_size": 2}, "sequence_parallel_size"),
        ({"elasticity": {"enabled": True, "max_train_batch_size": 4}}, "elasticity"),
        ({"optimizer": {"type": "Lamb", "params": {"momentum": 0.9}}}, "optimizer.type"),
        ({"zero_optimization": {"zeropp_loco_param": {"err_beta": 0.8}}}, "zero_optimization.zeropp_loco_param"),
    ],
)
def test_what_raydz_does_not_do_is_refused_by_name_with_the_reason(given, name):
    with pytest.raises(ConfigError) as caught:
        load_engine(given)
    assert caught.value.where.startswith(f"{name} ") and caught.value.remedy


def test_article_file_parses_and_trains(configs, warned):
    article = load_engine(configs / "article_zero3.json")
    zero = article.zero_optimization
    assert (zero.stage, zero.reduce_bucket_size, zero.stage3_prefetch_bucket_size) == (3, 50_000_000, 50_000_000)
    assert zero.stage3_param_persistence_threshold == 100_000 and article.optimizer.params.lr == 1e-4
    assert "zero_optimization" not in warned()
    assert zero.offload_optimizer.device == zero.offload_param.device == "cpu"
    check_trainable(article)


def test_article_file_without_offload_trains(configs):
    config = load(
        {"deepspeed": str(configs / "article_zero3.json"), "data": {"sources": ["a.txt"]}},
        ["zero_optimization.offload_optimizer.device=none", "zero_optimization.offload_param=null"],
    )
    check_trainable(config)
    check_trainable(config.engine())


def test_deepspeed_and_raydz_keys_share_the_checkpoint_section(warned):
    config = load({"checkpoint": {"every": 7, "load_universal": True}})
    assert config.checkpoint.every == 7
    assert "checkpoint.load_universal has no effect here" in warned()
    load_engine({"checkpoint": {"tag_validation": "Fail"}})
    with pytest.raises(ConfigError, match="unknown key"):
        load_engine({"checkpoint": {"every": 7}})

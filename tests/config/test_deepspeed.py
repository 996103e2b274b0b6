"""The table of DeepSpeed's keys against the code and against a transcription of DeepSpeed 0.19's keys."""

from __future__ import annotations

from pydantic import BaseModel

from raydz.config import load_engine
from raydz.config.deepspeed import KEYS
from raydz.config.engine import EngineConfig, OptimizerConfig, ZeroConfig
from raydz.config.offload import OffloadOptimizerConfig, OffloadParamConfig
from raydz.config.scheduler import LRRangeTestParams, OneCycleParams, WarmupCosineLRParams, WarmupLRParams
from raydz.config.screen import table_tree

TOP_LEVEL = """
train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
steps_per_print gradient_clipping prescale_gradients gradient_predivide_factor gradient_allreduce_op
communication_data_type
seq_parallel_communication_data_type sparse_gradients sequence_parallel_size disable_allgather
zero_allow_untested_optimizer zero_force_ds_cpu_optimizer dataloader_drop_last dump_state wall_clock_breakdown
memory_breakdown graph_harvesting vocabulary_size log_level use_data_before_expert_parallelism timers data_types
optimizer scheduler fp16 bf16 amp torch_autocast zero_optimization aio activation_checkpointing comms_logger
flops_profiler
tensorboard csv_monitor wandb comet checkpoint nebula datastates_ckpt autotuning elasticity compile tensor_parallel
expert_parallel hybrid_engine pipeline data_efficiency curriculum_learning progressive_layer_drop eigenvalue
sparse_attention compression_training
"""
ZERO = """
stage contiguous_gradients reduce_scatter reduce_bucket_size use_multi_rank_bucket_allreduce allgather_partitions
allgather_bucket_size overlap_comm load_from_fp32_weights elastic_checkpoint offload_param offload_optimizer zenflow
sub_group_size stage3_prefetch_bucket_size stage3_param_persistence_threshold stage3_model_persistence_threshold
stage3_max_live_parameters stage3_max_reuse_distance stage3_gather_16bit_weights_on_model_save
stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
ignore_unused_parameters legacy_stage1 round_robin_gradients zero_hpz_partition_size zero_quantized_weights
zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param mics_shard_size
mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint override_module_apply
log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory leaf_module compute_grad_norm
"""


def test_every_key_of_deepspeed_has_a_row():
    tree = table_tree()
    assert set(tree) == set(TOP_LEVEL.split())
    assert set(tree["zero_optimization"]) == set(ZERO.split())


def test_table_says_the_defaults_that_the_code_has():
    models = {
        "": EngineConfig(),
        "zero_optimization.": ZeroConfig(),
        "zero_optimization.offload_optimizer.": OffloadOptimizerConfig(),
        "zero_optimization.offload_param.": OffloadParamConfig(),
        "optimizer.": OptimizerConfig(),
        "optimizer.params.": OptimizerConfig().params,
        "scheduler.params.": WarmupLRParams(),
        "bf16.": EngineConfig().bf16,
        "fp16.": EngineConfig().fp16,
        "data_types.": EngineConfig().data_types,
        "activation_checkpointing.": EngineConfig().activation_checkpointing,
    }
    compared = 0
    for prefix, model in models.items():
        for name in type(model).model_fields:
            value = getattr(model, name)
            if isinstance(value, BaseModel) or prefix + name not in KEYS:
                continue
            assert KEYS[prefix + name].our_default == value, prefix + name
            compared += 1
    assert compared > 40
    cycle = OneCycleParams(cycle_min_lr=0.0, cycle_max_lr=0.0)
    for name, value in [*LRRangeTestParams(), *cycle]:
        if name not in cycle.model_fields_set:
            assert KEYS["scheduler.params." + name].our_default == value, name
    for name, value in WarmupCosineLRParams():
        assert KEYS["scheduler.params." + name].our_default == value, name


def test_every_field_of_the_engine_that_deepspeed_has_stands_in_the_table():
    ours = {"parallel", "seed"}
    tree = table_tree()
    assert set(EngineConfig.model_fields) - ours <= set(tree)
    assert set(ZeroConfig.model_fields) <= set(tree["zero_optimization"])
    assert set(OffloadOptimizerConfig.model_fields) <= set(tree["zero_optimization"]["offload_optimizer"])
    assert set(OffloadParamConfig.model_fields) <= set(tree["zero_optimization"]["offload_param"])


def test_defaults_are_those_of_0_19():
    engine = EngineConfig()
    assert engine.gradient_clipping == 1.0  # 0 before 0.19
    assert engine.zero_optimization.stage == 0
    assert engine.optimizer.params.model_dump() == {
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "adam_w_mode": True,
        "bias_correction": True,
    }
    assert OffloadOptimizerConfig().pin_memory and OffloadParamConfig().pin_memory
    sizes = ("reduce_bucket_size", "allgather_bucket_size", "stage3_prefetch_bucket_size")
    assert {getattr(engine.zero_optimization, name) for name in sizes} == {None}


def test_every_key_that_is_not_honoured_says_why():
    assert [path for path, row in KEYS.items() if row.verdict != "honoured" and not row.reason] == []


OFFLOAD = {
    "zero_optimization.offload_optimizer": """
        device nvme_path buffer_count pin_memory pipeline_read pipeline_write fast_init ratio super_offload
        cpuadam_cores_perc""",
    "zero_optimization.offload_param": "device nvme_path buffer_count buffer_size max_in_cpu pin_memory",
    "aio": "block_size queue_depth thread_count intra_op_parallelism single_submit overlap_events use_gds",
}
WITHOUT_EFFECT = {"fast_init", "super_offload", "cpuadam_cores_perc", "use_gds"}


def test_every_offload_key_is_honoured_or_has_no_effect_for_a_reason():
    for section, names in OFFLOAD.items():
        rows = {path.rpartition(".")[2]: row for path, row in KEYS.items() if path.rpartition(".")[0] == section}
        assert set(rows) == set(names.split()), section
        for name, row in rows.items():
            assert row.verdict == ("no effect" if name in WITHOUT_EFFECT else "honoured"), name
            assert row.reason or name not in WITHOUT_EFFECT, name


def test_an_offload_section_with_all_keys_loads_and_what_has_no_effect_is_named(warned):
    zero = {
        "stage": 3,
        "offload_optimizer": {
            "device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": True, "pipeline_read": True,
            "pipeline_write": True, "fast_init": True, "ratio": 0.5, "super_offload": True, "cpuadam_cores_perc": 0.5,
        },
        "offload_param": {
            "device": "nvme", "nvme_path": "/nvme", "buffer_count": 6, "buffer_size": 1e8, "max_in_cpu": 1e9,
            "pin_memory": True,
        },
    }  # fmt: skip
    aio = {
        "block_size": 1048576, "queue_depth": 32, "thread_count": 2, "intra_op_parallelism": 2, "single_submit": True,
        "overlap_events": False, "use_gds": True,
    }  # fmt: skip
    load_engine({"zero_optimization": zero, "aio": aio})
    for name in WITHOUT_EFFECT:
        assert f"{name} has no effect here" in warned(), name
    for name in ("pipeline_read", "buffer_count", "queue_depth", "max_in_cpu"):
        assert name not in warned()

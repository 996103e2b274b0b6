"""Every configuration key of DeepSpeed 0.19, its default, and what becomes of it here: the one table.

Layer 1. `screen` walks a configuration along this table before `engine` validates what is left.

HONOURED: means here what it means there. NO_EFFECT: accepted, and a warning names it with the reason once it asks for
something other than its default. REFUSED: an error with the reason, once it asks for something.

`default` is DeepSpeed's. `ours` is given where raydz deliberately starts from another value:
`AUTO_SIZE` sizes scale with the model, because fixed ones make stage 3 use more memory than stage 2 on small models.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Verdict = Literal["honoured", "no effect", "refused"]
_SAME = object()
AUTO_SIZE = None
F, T = False, True


@dataclass(frozen=True)
class Key:
    """One row. A row whose default is a mapping stands for a whole section with those keys ({}: any keys)."""

    path: str
    verdict: Verdict
    default: Any
    reason: str = ""
    ours: Any = _SAME

    @property
    def our_default(self) -> Any:
        """The default here."""
        return self.default if self.ours is _SAME else self.ours

    def asks_for_something(self, value: Any) -> bool:
        """Whether `value` differs from leaving the key out."""
        if value in (None, "auto", self.our_default):
            return False
        if isinstance(self.default, Mapping) and isinstance(value, Mapping):
            if "enabled" in self.default or "enabled" in value:
                return value.get("enabled", False) not in (False, None, "auto")
            return any(name not in self.default or value[name] != self.default[name] for name in value)
        return bool(value != self.default)


def _rows(verdict: Verdict, prefix: str, reason: str, **defaults: Any) -> list[Key]:
    return [Key(prefix + name, verdict, default, reason) for name, default in defaults.items()]


def _sized(name: str, default: int) -> Key:
    return Key("zero_optimization." + name, "honoured", default, "scaled with the model", ours=AUTO_SIZE)


_ZERO, _PARAMS, _ACTIVATIONS = "zero_optimization.", "optimizer.params.", "activation_checkpointing."
_LATER = "comes with a later release"
_LOGS = "metrics go to MLflow and the run's journal"
_OWN = "optimizers are raydz's own"
_UNITS = "modules are gathered as units, see parallel.units"

_HONOURED = [
    *_rows(
        "honoured", "", "", train_batch_size=None, train_micro_batch_size_per_gpu=None, gradient_accumulation_steps=None
    ),
    *_rows("honoured", "", "", gradient_clipping=1.0, communication_data_type=None),
    *_rows("honoured", "", "", prescale_gradients=F, gradient_predivide_factor=1.0),
    Key("data_types.grad_accum_dtype", "honoured", None, "of what micro-batches add up in", ours="fp32"),
    Key("optimizer.type", "honoured", None, "AdamW where the file names none", ours="AdamW"),
    *_rows("honoured", _PARAMS, "", lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0),
    *_rows("honoured", _PARAMS, "", adam_w_mode=T, bias_correction=T),
    *_rows("honoured", _PARAMS, "Muon's", momentum=0.95, muon_lr=None, adam_lr=None, ns_method="gram"),
    Key("scheduler.type", "honoured", None),
    *_rows("honoured", "scheduler.params.", "", warmup_min_lr=0.0, warmup_max_lr=None, warmup_num_steps=1000),
    *_rows("honoured", "scheduler.params.", "", warmup_type="log", total_num_steps=None, warmup_min_ratio=0.0),
    *_rows("honoured", "scheduler.params.", "", cos_min_ratio=1e-4),
    *_rows("honoured", "scheduler.params.", "", lr_range_test_min_lr=1e-3, lr_range_test_step_size=2000),
    *_rows("honoured", "scheduler.params.", "", lr_range_test_step_rate=1.0, lr_range_test_staircase=F),
    *_rows("honoured", "scheduler.params.", "", cycle_min_lr=None, cycle_max_lr=None, decay_lr_rate=0.0),
    *_rows("honoured", "scheduler.params.", "", cycle_first_step_size=2000, cycle_second_step_size=None),
    *_rows("honoured", "scheduler.params.", "", cycle_first_stair_count=0, cycle_second_stair_count=None),
    *_rows("honoured", "scheduler.params.", "", decay_step_size=0, cycle_momentum=T, decay_mom_rate=0.0),
    *_rows("honoured", "scheduler.params.", "", cycle_min_mom=0.8, cycle_max_mom=0.9),
    Key("bf16.enabled", "honoured", F),
    *_rows("honoured", "bf16.", "rounded by chance", bf16_master_weights_and_grads=F, bf16_optimizer_states=F),
    *_rows("honoured", "fp16.", "", enabled=F, loss_scale=0.0, initial_scale_power=16, loss_scale_window=1000),
    *_rows("honoured", "fp16.", "", hysteresis=2, consecutive_hysteresis=F, min_loss_scale=1.0),
    *_rows("honoured", _ZERO, "", stage=0, stage3_max_live_parameters=1_000_000_000),
    *_rows("honoured", _ZERO, "", mics_shard_size=-1, overlap_comm=None, reduce_scatter=T),
    *_rows("honoured", _ZERO, "", sub_group_size=1_000_000_000, ignore_unused_parameters=T),
    *_rows("honoured", _ZERO, "", zero_hpz_partition_size=1, zero_quantized_weights=F, zero_quantized_gradients=F),
    *_rows("honoured", _ZERO, "", zero_quantized_nontrainable_weights=F),
    *_rows("honoured", _ZERO, "", stage3_gather_16bit_weights_on_model_save=F),
    *_rows("honoured", _ZERO, "", stage3_model_persistence_threshold=sys.maxsize),
    *_rows("honoured", _ACTIVATIONS, "of blocks that are recomputed", cpu_checkpointing=F),
    _sized("reduce_bucket_size", 500_000_000),
    _sized("allgather_bucket_size", 500_000_000),
    _sized("stage3_prefetch_bucket_size", 50_000_000),
    _sized("stage3_param_persistence_threshold", 100_000),
    _sized("stage3_max_reuse_distance", 1_000_000_000),
]

_OFFLOAD = [
    *_rows("honoured", _ZERO + "offload_optimizer.", "", device="none", pin_memory=T),
    *_rows("honoured", _ZERO + "offload_optimizer.", "what is needed first stays on the device", ratio=1.0),
    *_rows("no effect", _ZERO + "offload_optimizer.", "states begin as zeros that nobody writes", fast_init=F),
    *_rows("honoured", _ZERO + "offload_optimizer.", "", nvme_path=None, buffer_count=4),
    Key(_ZERO + "offload_optimizer.pipeline_read", "honoured", F, "yes where it is left out", ours=None),
    Key(_ZERO + "offload_optimizer.pipeline_write", "honoured", F, "yes where it is left out", ours=None),
    *_rows("honoured", "aio.", "", block_size=1 << 20, queue_depth=8, single_submit=F, overlap_events=T),
    *_rows("honoured", "aio.", "threads, each with a ring of its own", thread_count=1, intra_op_parallelism=None),
    *_rows("no effect", "aio.", "reads and writes go through host memory, where updates are made", use_gds=F),
    *_rows("honoured", _ZERO + "offload_param.", "stage 3", device="none", pin_memory=T),
    *_rows("honoured", _ZERO + "offload_param.", "of a disk", nvme_path=None, buffer_count=5, buffer_size=100_000_000),
    *_rows("honoured", _ZERO + "offload_param.", "of a disk", max_in_cpu=1_000_000_000),
    *_rows("no effect", _ZERO + "offload_optimizer.", "see parallel.offload_update, which is exact", super_offload=F),
    *_rows("no effect", _ZERO + "offload_optimizer.", "see parallel.offload_threads", cpuadam_cores_perc=0.8),
]

_NO_EFFECT = [
    *_rows("no effect", "", "embedding gradients are dense", sparse_gradients=F),
    *_rows("no effect", "", "there is no sequence parallelism yet", seq_parallel_communication_data_type="fp32"),
    *_rows("no effect", "", "weights are always gathered by all-gather", disable_allgather=F),
    *_rows("no effect", "", _OWN, zero_force_ds_cpu_optimizer=T, zero_allow_untested_optimizer=F),
    *_rows("no effect", "", "the order of rows is the data section's", dataloader_drop_last=F),
    *_rows("no effect", "", "the resolved configuration is always shown", dump_state=F),
    *_rows("no effect", "", _LOGS, wall_clock_breakdown=F, memory_breakdown=F, timers={}, comms_logger={"enabled": F}),
    *_rows("no effect", "", _LOGS, tensorboard={"enabled": F}, csv_monitor={"enabled": F}),
    *_rows("no effect", "", _LOGS, wandb={"enabled": F}, comet={"enabled": F}),
    *_rows("no effect", "", "see train.log_every", steps_per_print=None),
    *_rows("no effect", "", "model FLOP utilisation is a metric of every step", flops_profiler={"enabled": F}),
    *_rows("no effect", "", "there are no CUDA graphs here", graph_harvesting=F),
    *_rows("no effect", "", "read by DeepSpeed's own tools alone", vocabulary_size=None, log_level=None, eigenvalue={}),
    *_rows("no effect", "", "there are no experts yet", use_data_before_expert_parallelism=F),
    *_rows("no effect", _ACTIVATIONS, "only whole inputs of blocks are kept", partition_activations=F),
    *_rows("no effect", _ACTIVATIONS, "every block is recomputed", number_checkpoints=None),
    *_rows("no effect", _ACTIVATIONS, "host buffers are always used again", contiguous_memory_optimization=F),
    *_rows("no effect", _ACTIVATIONS, "streams wait for events alone", synchronize_checkpoint_boundary=F),
    *_rows("no effect", _ACTIVATIONS, _LOGS, profile=F),
    *_rows("no effect", "", "checkpoints are raydz's own", nebula={"enabled": F}, datastates_ckpt={}),
    *_rows("no effect", "checkpoint.", "checkpoints are raydz's own", tag_validation="Warn", load_universal=F),
    *_rows("no effect", "checkpoint.", "checkpoints are raydz's own", use_node_local_storage=F, parallel_write={}),
    *_rows("no effect", "checkpoint.", "checkpoints are raydz's own", checkpoint_serialization=T, writer=None),
    *_rows("no effect", "", "see model.compile, or compile the model beforehand", compile={"deepcompile": F}),
    *_rows("no effect", "optimizer.", "there is one form of each optimizer", legacy_fusion=F),
    *_rows("no effect", _PARAMS, "there is one form of each optimizer", torch_adam=F, fused=F, foreach=F),
    *_rows("no effect", "scheduler.params.", "a resumed run knows its step", last_batch_iteration=-1),
    *_rows("no effect", "fp16.", "inputs are always cast to the compute dtype", auto_cast=F),
    *_rows("no effect", "bf16.", "a non-finite gradient always skips the step", check_grad_overflow=T),
    *_rows("no effect", "bf16.", "gradients reach the masters when they are reduced", immediate_grad_update=F),
    *_rows("no effect", _ZERO, "the pass that casts a gradient writes it into its flat buffer", contiguous_gradients=T),
    *_rows("no effect", _ZERO, "every rank owns an equal part of every bucket", use_multi_rank_bucket_allreduce=T),
    *_rows("no effect", _ZERO, "every rank owns and copies an equal part of every bucket", round_robin_gradients=F),
    *_rows("no effect", _ZERO, "weights are always gathered by all-gather", allgather_partitions=T),
    *_rows("no effect", _ZERO, "masters always come from the checkpoint's fp32", load_from_fp32_weights=T),
    *_rows("no effect", _ZERO, "every checkpoint loads at any world size", elastic_checkpoint=F),
    *_rows("no effect", _ZERO, _UNITS, stage3_module_granularity_threshold=0, leaf_module={}, override_module_apply=T),
    *_rows("no effect", _ZERO, _UNITS, stage3_use_all_reduce_for_fetch_params=F, stage3_allgather_sequential=F),
    *_rows("no effect", _ZERO, "the forward reads gathered weights in place", memory_efficient_linear=T),
    *_rows("no effect", _ZERO, "ranks read only their own shards", pipeline_loading_checkpoint=F),
    *_rows(
        "no effect", _ZERO, "order and sizes are always checked", log_trace_cache_warnings=F, enable_sanity_checks=F
    ),
    *_rows("no effect", _ZERO, "the momentum is sharded as other states are", save_muon_momentum_buffer_in_memory=F),
    *_rows("no effect", _ZERO, "the norm decides whether a step is skipped", compute_grad_norm=T),
]

_REFUSED = [
    *_rows("refused", "", "use bf16 in place of mixed precision by apex or autocast", amp={"enabled": F}),
    *_rows("refused", "", "use bf16 in place of mixed precision by autocast", torch_autocast={"enabled": F}),
    *_rows("refused", "", "engine.step decides the boundaries", managed_gradient_accumulation=T),
    *_rows("refused", "", "gradients are averaged; scale the loss to get a sum", gradient_allreduce_op="mean"),
    *_rows("refused", "", f"sequence parallelism {_LATER}", sequence_parallel_size=1),
    *_rows("refused", "", f"tensor parallelism {_LATER}", tensor_parallel={"autotp_size": 0}),
    *_rows("refused", "", f"expert parallelism {_LATER}", expert_parallel={"enabled": F}),
    *_rows("refused", "", "pipeline stages are not raydz's kind of parallelism", pipeline={}),
    *_rows("refused", "", f"tuning {_LATER}", autotuning={"enabled": F}),
    *_rows("refused", "", "train_batch_size stays, the number of ranks may change", elasticity={"enabled": F}),
    *_rows("refused", "", f"the hybrid engine of RLHF {_LATER}", hybrid_engine={"enabled": F}),
    *_rows("refused", "", "it changes which rows are trained on", data_efficiency={"enabled": F}),
    *_rows("refused", "", "it changes which rows are trained on", curriculum_learning={"enabled": F}),
    *_rows("refused", "", "it changes the model that is trained", progressive_layer_drop={"enabled": F}),
    *_rows("refused", "", "it changes the model that is trained", sparse_attention={}, compression_training={}),
    *_rows("refused", "data_types.", "use bf16 to choose the compute dtype", param_dtype=None, buffer_dtype=None),
    *_rows("refused", _PARAMS, "AdamW without AMSGrad", amsgrad=F),
    *_rows("refused", _PARAMS, "use gradient_clipping", max_grad_norm=0),
    *_rows("refused", "fp16.", "updates below fp16's range vanish; use bf16", fp16_master_weights_and_grads=F),
    *_rows("refused", _ZERO, "the old stage 1 is gone from DeepSpeed too", legacy_stage1=F),
    *_rows("refused", _ZERO, f"ZenFlow {_LATER}", zenflow=None),
    *_rows("refused", _ZERO, "gradients are rounded without error feedback", zeropp_loco_param=None),
    *_rows("refused", _ZERO, f"hierarchical MiCS gathers: {_LATER}", mics_hierarchical_params_gather=F),
]

KEYS: dict[str, Key] = {row.path: row for row in (*_HONOURED, *_OFFLOAD, *_NO_EFFECT, *_REFUSED)}

_OTHER_OPTIMIZERS = "Lamb OneBitAdam ZeroOneAdam OneBitLamb MuAdam MuAdamW MuSGD"
_TRAIN = "Adam, AdamW, SGD, Lion, Muon, Adagrad and torch's other elementwise ones train"
_NOT_ELEMENTWISE = {
    "adafactor": "it factors second moments over a matrix's rows and columns, which a flat shard does not have",
    "asgd": "its step size depends on the learning rate of the step before, which checkpoints do not keep",
    "lbfgs": "it evaluates the loss again within a step",
    "rprop": "it is for gradients of the whole data set, and its states do not begin at zero",
    "sparseadam": "gradients are dense here",
}
REFUSED_VALUES: dict[str, dict[str, str]] = {
    "optimizer.type": dict.fromkeys(_OTHER_OPTIMIZERS.lower().split(), f"it {_LATER}; {_TRAIN}") | _NOT_ELEMENTWISE,
}
"""Values that DeepSpeed knows for an honoured key and raydz does not have, in lower case, with the reason."""

ALIASES = {
    "bfloat16": "bf16",
    "zero_optimization.stage3_gather_fp16_weights_on_model_save": "zero_optimization."
    "stage3_gather_16bit_weights_on_model_save",
}
"""Old names that mean exactly the new key."""

"""What the engine sees: DeepSpeed's sections under DeepSpeed's names, plus `parallel` and a seed.

Layer 1. `raydz.engine.Engine` is built from an `EngineConfig` alone, without model, data or Ray; `deepspeed` holds the
table of all keys and says what each default is; `schema.Config` has the same sections inline.
"""

from __future__ import annotations

import sys
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PrivateAttr, model_validator

from raydz.config.batch import BatchSize, cut_batch, resolve_batch
from raydz.config.faults import Fault, Unfit
from raydz.config.offload import AioConfig, OffloadOptimizerConfig, OffloadParamConfig
from raydz.config.optimizer import AnyOptimizerConfig, OptimizerConfig
from raydz.config.scheduler import SchedulerConfig, WarmupCosineLR, WarmupDecayLR
from raydz.config.section import AboveZero, Count, Fraction, NonNegative, Positive, Section, Whole
from raydz.errors import ConfigError
from raydz.units import parse_bytes

_DTYPES = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16", "float16": "fp16", "half": "fp16"}


_INT8 = ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients")


def _spelling(table: dict[str, str]) -> BeforeValidator:
    """Other spellings that DeepSpeed accepts for the same value."""
    return BeforeValidator(lambda value: table.get(value.lower(), value) if isinstance(value, str) else value)


def _recomputation(value: Any) -> Any:
    """A switch has two of the three modes."""
    return ("none", "full")[value] if isinstance(value, bool) else value


Recomputation = Annotated[Literal["none", "full", "selective"], BeforeValidator(_recomputation)]
"""What backward computes again, block by block: nothing, all, or what is cheap (no matrix product, no attention)."""
AccumulationDtype = Annotated[Literal["fp32", "bf16", "fp16"], _spelling(_DTYPES)]


def _bytes_or_fraction(value: Any) -> Any:
    try:
        is_size = parse_bytes(value) > 0 if isinstance(value, str) else not isinstance(value, bool) and value > 0
    except (ConfigError, TypeError):
        is_size = False
    if not is_size:
        raise Unfit(Fault("", "wrong value", got=repr(value), wanted="a fraction up to 1, or a size such as 64GiB"))
    return value


HostMemoryBudget = Annotated[str | float, BeforeValidator(_bytes_or_fraction)]


class Bf16Config(Section):
    """`bf16` (alias `bfloat16`): forward and backward in bf16 over fp32 masters."""

    enabled: bool = False
    bf16_master_weights_and_grads: bool = False
    """The bf16 weights are the masters, rounded by chance, and sums of gradients are kept in bf16."""
    bf16_optimizer_states: bool = False
    """Moments in bf16, rounded by chance."""


class Fp16Config(Section):
    """`fp16`: forward and backward in fp16 over fp32 masters, with a loss scale."""

    enabled: bool = False
    loss_scale: NonNegative = 0.0
    """0: dynamic, by the keys below; anything else is the scale for good."""
    initial_scale_power: Count = 16
    loss_scale_window: Positive = 1000
    hysteresis: Positive = 2
    consecutive_hysteresis: bool = False
    min_loss_scale: AboveZero = 1.0


class DataTypesConfig(Section):
    """`data_types`."""

    grad_accum_dtype: AccumulationDtype = "fp32"
    """Of the buffers in which the gradients of several micro-batches add up; sums over ranks are always fp32."""


class ZeroConfig(Section):
    """`zero_optimization`. Units: sizes and thresholds count elements; None means scaled with the model."""

    stage: Annotated[Whole, Field(ge=0, le=3)] = 0
    overlap_comm: bool | None = None
    """None: yes. False: every gather and reduction is awaited where it is launched, and nothing is gathered ahead."""
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    """False: every rank receives the whole sum of a bucket (all-reduce) and keeps its shard."""
    allgather_partitions: bool = True
    reduce_bucket_size: Positive | None = None
    allgather_bucket_size: Positive | None = None
    stage3_prefetch_bucket_size: Count | None = None
    stage3_param_persistence_threshold: Count | None = None
    stage3_model_persistence_threshold: Count = sys.maxsize
    """Most elements that stay gathered by the threshold, all together."""
    stage3_max_live_parameters: Count = 1_000_000_000
    stage3_max_reuse_distance: Count | None = None
    """A unit stays gathered after its forward if at most so many elements of others are used before it is again."""
    sub_group_size: Positive = 1_000_000_000
    """Elements that the optimizer updates at once."""
    ignore_unused_parameters: bool = True
    """False: a backward that leaves a parameter without a gradient is an error."""
    mics_shard_size: int = -1
    zero_hpz_partition_size: Count = 1
    """Consecutive ranks that keep a second copy of the weights among themselves, for gathers after the first."""
    zero_quantized_weights: bool = False
    """Gather weights as int8 blocks."""
    zero_quantized_nontrainable_weights: bool = False
    """Gather frozen weights as int8 blocks."""
    zero_quantized_gradients: bool = False
    """Reduce gradients as int8 blocks."""
    stage3_gather_16bit_weights_on_model_save: bool = False
    """Whether `save_16bit_model` may gather the weights at stage 3."""
    offload_optimizer: OffloadOptimizerConfig | None = None
    offload_param: OffloadParamConfig | None = None


class ActivationConfig(Section):
    """`activation_checkpointing`: DeepSpeed's section; `parallel.activation_checkpointing` says what is recomputed."""

    cpu_checkpointing: bool = False
    """Keep the inputs of recomputed blocks in pinned host memory until backward."""


class ParallelConfig(Section):
    """`parallel`: how the engine cuts and moves the model, beyond what DeepSpeed has keys for."""

    units: list[str] | None = None
    """Patterns (fnmatch) of module names that are gathered as one; None: chosen by the engine."""
    fp32_modules: list[str] | None = None
    """Patterns (fnmatch) of module names that stay fp32 in a 16-bit model: routers, norms."""
    activation_checkpointing: Recomputation = "none"
    """Of the units that are blocks, in any model."""
    gradient_reduction: Literal["micro_batch", "boundary"] = "micro_batch"
    """When stages 2 and 3 reduce under accumulation."""
    shard_size: Positive | None = None
    """Ranks that share one copy of the state; groups of so many neighbours hold replicas. None: all ranks share one."""
    ordered_collectives: Literal["auto"] | bool = "auto"
    """Sum in rank order, so that results don't depend on bucket sizes; auto: on gloo."""
    collective_timeout_s: AboveZero = 300.0
    divergence_timeout_s: AboveZero = 20.0
    """How long a rank waits in a collective before it asks the others whether they will ever come."""
    host_memory_budget: HostMemoryBudget | None = None
    """Host memory of a node that offload may hold, its ranks together: bytes, text such as "64GiB", or a fraction of
    what is available at the start; None: 0.9 of that."""
    offload_threads: Positive | None = None
    """Threads of a rank that update offloaded states; None: as many as its share of `offload_affinity`, or of the CPUs
    that the process may run on."""
    offload_update: Literal["auto", "waiting", "speculative"] = "auto"
    """Whether offloaded states are updated before the gradient norm is known, in second buffers, so that undoing it
    costs nothing but time; auto: while the host has room for them and clipping is not what most steps do."""
    offload_affinity: list[Whole] | None = None
    """CPUs of the node on which these threads run, shared out over its ranks; None: all that the process may use."""
    offload_explain_above: Fraction = 0.1
    """A share of a step that waits for offload above which a line of the log says what limits; once in 100 steps."""


class EngineSections(Section):
    """The sections that stand inline in a run's file as well as in a pure DeepSpeed file."""

    train_batch_size: Positive | None = None
    train_micro_batch_size_per_gpu: Positive | None = None
    gradient_accumulation_steps: Positive | None = None
    optimizer: AnyOptimizerConfig = OptimizerConfig()
    scheduler: SchedulerConfig | None = None
    gradient_clipping: NonNegative = 1.0
    steps_per_print: Positive | None = None
    wall_clock_breakdown: bool = False
    bf16: Bf16Config = Bf16Config()
    fp16: Fp16Config = Fp16Config()
    zero_optimization: ZeroConfig = ZeroConfig()
    zero_allow_untested_optimizer: bool = False
    communication_data_type: AccumulationDtype | None = None
    prescale_gradients: bool = False
    """All of the division by the number of ranks comes before the reduction, whatever the factor."""
    gradient_predivide_factor: AboveZero = 1.0
    """Other than 1: gradients are divided by it before the reduction, and by the rest of the ranks' number after it."""
    data_types: DataTypesConfig = DataTypesConfig()
    activation_checkpointing: ActivationConfig = ActivationConfig()
    aio: AioConfig = AioConfig()
    parallel: ParallelConfig = ParallelConfig()

    _most_ranks: int | None = PrivateAttr(None)
    """Of a run whose number of ranks changes: the batch is then cut unevenly where ranks do not divide it."""

    def batch(self, world_size: int) -> BatchSize:
        """The batch triangle on `world_size` data-parallel ranks.

        Raises:
            ConfigError: the given sizes don't close; names them and the changes that would fit.
        """
        if self._most_ranks is not None and self.train_batch_size is not None:
            return cut_batch(
                self.train_batch_size, self.train_micro_batch_size_per_gpu, world_size, most_ranks=self._most_ranks
            )
        return resolve_batch(
            self.train_batch_size, self.train_micro_batch_size_per_gpu, self.gradient_accumulation_steps, world_size
        )

    @property
    def shard_size(self) -> int | None:
        """Size of a shard group: `parallel.shard_size`, or DeepSpeed's `mics_shard_size`; None for the whole world."""
        mics = self.zero_optimization.mics_shard_size
        return self.parallel.shard_size or (mics if mics > 0 else None)

    @property
    def compute_dtype(self) -> Literal["fp32", "bf16", "fp16"]:
        """Dtype of forward and backward."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @model_validator(mode="after")
    def _zeropp_is_of_stage_3(self) -> EngineSections:
        zero = self.zero_optimization
        asked = [key for key in _INT8 if getattr(zero, key)]
        asked += ["zero_hpz_partition_size"] if zero.zero_hpz_partition_size > 1 else []
        faults = [
            Fault(f"zero_optimization.{key}", "only ZeRO stage 3 has this", got=f"stage {zero.stage}", wanted="stage 3")
            for key in asked
            if zero.stage < 3
        ]
        if zero.zero_quantized_gradients and not zero.reduce_scatter:
            key = "zero_optimization.zero_quantized_gradients"
            faults.append(Fault(key, "an all-reduce cannot send int8", wanted="zero_optimization.reduce_scatter: true"))
        if faults:
            raise Unfit(*faults)
        return self

    @property
    def offloads_optimizer(self) -> bool:
        """Whether masters and optimizer states live in host memory or on a disk."""
        section = self.zero_optimization.offload_optimizer
        return section is not None and section.device != "none"

    @property
    def offloads_parameters(self) -> bool:
        """Whether released weights live in host memory or on a disk."""
        section = self.zero_optimization.offload_param
        return section is not None and section.device != "none"

    @model_validator(mode="after")
    def _parameters_are_offloaded_at_stage_3(self) -> EngineSections:
        stage = self.zero_optimization.stage
        if self.offloads_parameters and stage < 3:
            key = "zero_optimization.offload_param.device"
            what, remedy = "only what is released can live elsewhere", "offload_optimizer works at every stage"
            raise Unfit(Fault(key, what, got=f"stage {stage}", wanted="stage 3, or device: none", remedy=remedy))
        return self

    @property
    def accumulation_dtype(self) -> AccumulationDtype:
        """Dtype in which micro-batches add up."""
        return "bf16" if self.bf16.bf16_master_weights_and_grads else self.data_types.grad_accum_dtype

    @model_validator(mode="after")
    def _one_compute_dtype(self) -> EngineSections:
        if self.bf16.enabled and self.fp16.enabled:
            raise Unfit(Fault("fp16.enabled", "fp16 and bf16 are both enabled", wanted="one of them"))
        for key in ("bf16_master_weights_and_grads", "bf16_optimizer_states"):
            if getattr(self.bf16, key) and not self.bf16.enabled:
                raise Unfit(Fault(f"bf16.{key}", "bf16 is not enabled", wanted="bf16.enabled: true"))
        return self


class EngineConfig(EngineSections):
    """All that `raydz.initialize` needs; made by `load_engine` or `Config.engine`."""

    seed: Whole = 0

    @model_validator(mode="after")
    def _length_of_schedule(self) -> EngineConfig:
        if isinstance(self.scheduler, WarmupDecayLR | WarmupCosineLR) and self.scheduler.params.total_num_steps is None:
            raise Unfit(
                Fault(
                    "scheduler.params.total_num_steps",
                    "a required key is missing",
                    wanted=f"the number of optimizer steps over which {self.scheduler.type} runs",
                )
            )
        return self

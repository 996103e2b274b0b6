"""From a configuration and units to the plan of one stage on so many ranks.

Neighbours: `cli/plan.py` and `train/memory.py` make a `Planner`; `advice.py` asks it what else would fit;
`budget.py` compares a plan with what is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from raydz.config import BatchSize
from raydz.config.engine import EngineSections, Recomputation
from raydz.errors import ConfigError
from raydz.plan.activations import Workload, activation_bytes, loss_bytes
from raydz.plan.groups import GroupShape, cut_groups, engine_sizes, kept_units
from raydz.plan.memory import (
    ElementBytes,
    Memory,
    Sharding,
    bucket_bytes,
    gathered_bytes,
    snapshot_bytes,
    state_bytes,
)
from raydz.plan.offload import Offloaded, offloaded
from raydz.plan.shapes import UnitShape
from raydz.plan.traffic import Traffic, step_traffic

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
_STATES = {"Adam": 2, "AdamW": 2, "SGD": 0, "Lion": 1, "Muon": 2}
_STATES |= {"Adadelta": 2, "Adagrad": 1, "Adamax": 2, "NAdam": 2, "RAdam": 2, "RMSprop": 1}


@dataclass(frozen=True)
class Plan:
    """What one rank holds and sends.

    Args:
        shard_ranks: ranks that share one copy of the state.
        note: why the batch is not quite what the configuration says; "" if it is.
        persistent_bytes: of `memory.weights`, what stays gathered at stage 3.
        offloaded: what is in host memory and on disks in place of the device.
        snapshot_bytes: of host memory, beside `memory`, for saves behind training; 0: there are none.
    """

    stage: int
    ranks: int
    shard_ranks: int
    num_params: int
    batch: BatchSize
    note: str
    memory: Memory
    traffic: Traffic
    persistent_bytes: int
    offloaded: Offloaded
    snapshot_bytes: int
    recomputes: Recomputation | None

    def as_json(self) -> dict[str, Any]:
        """Plain values; bytes by part."""
        memory = {f"{name}_bytes": value for name, value in self.memory.parts().items()}
        totals = {"model_states_bytes": self.memory.model_states, "total_bytes": self.memory.total}
        return {
            "stage": self.stage,
            "ranks": self.ranks,
            "shard_ranks": self.shard_ranks,
            "params": self.num_params,
            "batch": asdict(self.batch),
            "note": self.note,
            **memory,
            **totals,
            "offloaded_host_bytes": self.offloaded.host,
            "offloaded_disk_bytes": self.offloaded.disk,
            "second_buffers_bytes": self.offloaded.second,
            "snapshot_bytes": self.snapshot_bytes,
            "sent_per_step_bytes": self.traffic.total,
            "sent_to_near_ranks_bytes": self.traffic.near,
        }


@dataclass(frozen=True)
class Planner:
    """A model and its configuration; every question of the kind "what if" is a call of `at`.

    Args:
        work: a row of its micro-batch; None for people's own models, whose activations nobody knows.
        device: "cpu" or "cuda": what collectives and kernels hold differs.
        saves_behind: checkpoints are saved behind training, from a copy in host memory.
        keeps_average: of the weights (`train.ema_decay`).
    """

    config: EngineSections
    units: Sequence[UnitShape]
    work: Workload | None
    device: str = "cpu"
    keeps_average: bool = False
    saves_behind: bool = False

    def at(
        self,
        ranks: int,
        *,
        stage: int | None = None,
        micro_batch: int | None = None,
        recomputes: Recomputation | None = None,
    ) -> Plan:
        """The plan on `ranks` ranks; None is what the configuration says.

        Raises:
            ConfigError: the shard size does not divide the ranks.
        """
        zero = self.config.zero_optimization
        stage = zero.stage if stage is None else stage
        batch, note = batch_at(self.config, ranks)
        if micro_batch is not None:
            accumulation = max(1, batch.global_batch // (micro_batch * ranks))
            batch = BatchSize(micro_batch * accumulation * ranks, micro_batch, accumulation)
        sharding = self._sharding(stage, ranks, batch)
        each = element_bytes(self.config, self.keeps_average)
        sizes = engine_sizes(zero, self.units)
        groups = cut_groups(self.units, sizes, stage=stage, ranks=sharding.ranks)
        states, away = state_bytes(groups, sharding, each), offloaded(groups, sharding, each, zero)
        states |= {name: states[name] - getattr(away, name) for name in ("weights", "masters", "moments")}
        work = self._workload(batch, recomputes)
        memory = Memory(
            **states,
            gathered=gathered_bytes(self.units, groups, sharding, sizes, each),
            buckets=bucket_bytes(self.units, groups, sharding, each),
            activations=0 if work is None else activation_bytes(work, each.compute),
            logits=0 if work is None else loss_bytes(work, each.compute),
        )
        traffic = step_traffic(
            self.units, groups, sharding, each, kept=kept_units(self.units, groups, sizes),
            accumulation=batch.accumulation, replicas=ranks // sharding.ranks,
        )  # fmt: skip
        return Plan(
            stage=stage,
            ranks=ranks,
            shard_ranks=sharding.ranks,
            num_params=sum(unit.numel for unit in self.units),
            batch=batch,
            note=note,
            memory=memory,
            traffic=traffic,
            persistent_bytes=_persistent(groups) * each.compute,
            offloaded=away,
            snapshot_bytes=snapshot_bytes(groups, sharding, each, ranks // sharding.ranks) if self.saves_behind else 0,
            recomputes=None if work is None else work.recomputes,
        )

    def _sharding(self, stage: int, ranks: int, batch: BatchSize) -> Sharding:
        parallel, zero, shared = self.config.parallel, self.config.zero_optimization, self.config.shard_size or ranks
        if ranks % shared:
            raise ConfigError(
                "the shard group size does not divide the ranks", where="parallel.shard_size", got=shared,
                wanted=f"a divisor of {ranks}",
            )  # fmt: skip
        near = zero.zero_hpz_partition_size
        if stage == 3 and shared % max(1, near):
            raise ConfigError(
                "groups of near ranks do not divide the ranks that share a shard",
                where="zero_optimization.zero_hpz_partition_size", got=near, wanted=f"a divisor of {shared}",
            )  # fmt: skip
        return Sharding(
            stage=stage,
            ranks=shared,
            sums_micro_batches=batch.accumulation > 1,
            at_boundary=parallel.gradient_reduction == "boundary",
            sum_bytes=_BYTES[self.config.accumulation_dtype],
            by_all_reduce=not zero.reduce_scatter,
            overlaps=zero.overlap_comm is not False,
            is_ordered=parallel.ordered_collectives is True or self.device == "cpu",
            near=near if stage == 3 and 1 < near < shared else None,
            offloads_weights=stage == 3 and zero.offload_param is not None and zero.offload_param.device != "none",
            int8_weights=zero.zero_quantized_weights and stage == 3,
            int8_frozen=zero.zero_quantized_nontrainable_weights and stage == 3,
            int8_gradients=zero.zero_quantized_gradients and stage == 3,
        )

    def _workload(self, batch: BatchSize, recomputes: Recomputation | None) -> Workload | None:
        if self.work is None:
            return None
        return replace(self.work, rows=batch.micro_batch, recomputes=recomputes or self.work.recomputes)


def element_bytes(config: EngineSections, keeps_average: bool = False) -> ElementBytes:
    """Bytes an element under the configured precision and optimizer, and where an average of the weights is kept."""
    compute, wire, params = config.compute_dtype, config.communication_data_type, config.optimizer.params
    states = _STATES[config.optimizer.type]
    if config.optimizer.type in ("SGD", "RMSprop"):
        states += sum(1 for key in ("momentum", "centered") if getattr(params, key, 0))
    state = 2 if config.bf16.bf16_optimizer_states else 4
    return ElementBytes(
        compute=_BYTES[compute],
        masters={"fp32": 0, "bf16": 0 if config.bf16.bf16_master_weights_and_grads else 2, "fp16": 4}[compute],
        moments=state * states,
        matrix_moments=state if config.optimizer.type == "Muon" else None,
        average=4 if keeps_average else 0,
        wire=None if wire is None else _BYTES[wire],
    )


def batch_at(config: EngineSections, ranks: int) -> tuple[BatchSize, str]:
    """The batch on `ranks` ranks; where the configured sizes do not close there, the nearest, and what to set."""
    try:
        return config.batch(ranks), ""
    except ConfigError:
        pass  # a plan for other ranks than the file's is the point of planning: say what would change
    rows, micro, accumulation = (
        config.train_batch_size, config.train_micro_batch_size_per_gpu, config.gradient_accumulation_steps,
    )  # fmt: skip
    if rows is None:
        accumulation = accumulation or 1
        return BatchSize(accumulation * ranks, 1, accumulation), "no batch size is given: micro-batches of one row"
    micro = micro or max(1, rows // (ranks * (accumulation or 1)))
    accumulation = max(1, round(rows / (micro * ranks)))
    batch = BatchSize(micro * accumulation * ranks, micro, accumulation)
    if batch.global_batch == rows:
        return batch, f"needs gradient_accumulation_steps {accumulation}"
    return batch, f"needs train_batch_size {batch.global_batch}, gradient_accumulation_steps {accumulation}"


def _persistent(groups: Sequence[GroupShape]) -> int:
    return sum(group.padded_numel for group in groups if group.persistent)

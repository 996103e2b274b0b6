"""The public Engine: forward, backward, step over a sharded module, in DeepSpeed's manner.

Neighbours: `train/loop.py` drives it; `zero/sharded.py` does the sharding, `zero/update.py` the step; `zero/access.py`
reaches whole parameters, `zero/verify.py` checks a step, `checkpoint/access.py` saves and loads. Needs no ray, mlflow
or boto3.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydz import log
from raydz.checkpoint.access import CheckpointAccess
from raydz.config import EngineConfig, check_trainable, load_engine
from raydz.dist import CommClock, Mesh, MeshShape, World, init_world
from raydz.errors import TrainingError
from raydz.models.checkpointing import offload_inputs, wrap_blocks
from raydz.offload.activations import ActivationOffload
from raydz.offload.options import Hosting
from raydz.offload.parameters import ParameterOffload
from raydz.offload.speculation import OffloadStep, with_waits
from raydz.optim import build_loss_scale, build_optimizer, build_schedule, clip_scale
from raydz.zero import (
    Communicators,
    ShardedModel,
    ShardedOptimizer,
    StagePolicy,
    ZeroOptions,
    install_hooks,
)
from raydz.zero.average import ShardedAverage
from raydz.zero.hosted import HostedOptimizer
from raydz.zero.initialize import choose_values, place_buffers
from raydz.zero.join import JoinAccess, Joining
from raydz.zero.moves import MoveAccess
from raydz.zero.precision import PrecisionPlan, map_tensors
from raydz.zero.settings import plan_settings
from raydz.zero.verify import StepVerification

_logger = log.get(__name__)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        step: committed steps after it.
        lr: the rate it ran at.
        grad_norm: global norm before clipping.
        skipped: the gradients were not finite, and nothing was changed.
        loss_scale: factor of the step's losses under fp16, which `grad_norm` is without; None otherwise.
        offload: how the update went where states are in host memory; None otherwise.
    """

    step: int
    lr: float
    grad_norm: float
    skipped: bool
    loss_scale: float | None = None
    offload: OffloadStep | None = None


class Engine(StepVerification, JoinAccess, MoveAccess, CheckpointAccess):
    """A module whose state is sharded over ranks, and the optimizer that trains it.

    Args:
        model: replaced in place: its parameters become views of sharded buffers.
        config: DeepSpeed's sections, see `raydz.config`.
        world: this process among all; `raydz.initialize` finds it.
        max_skipped_in_row: so many non-finite steps in a row end the training.
        ema_decay: keep a moving average of the weights, see `averaged`; None: none.
        model_parameters: parameter groups with rates and decays of their own, see `zero.settings.plan_settings`.

    Collective: every rank builds its engine at the same point, with the same arguments.

    Raises:
        ConfigError: an impossible configuration for this world.
    """

    def __init__(
        self,
        model: nn.Module,
        config: EngineConfig,
        world: World,
        *,
        max_skipped_in_row: int = 20,
        ema_decay: float | None = None,
        model_parameters: Iterable[Any] | None = None,
    ) -> None:
        check_trainable(config)
        self.config, self.world, self.module = config, world, model
        near_size = config.zero_optimization.zero_hpz_partition_size
        shape = MeshShape.for_world(world.world_size, shard_size=config.shard_size, near_size=near_size)
        self.mesh = Mesh(shape, world.rank)
        self.batch = config.batch(self.mesh.shape.batch_world_size)
        self.clock = CommClock(world.device)
        # "auto" is ordered where it costs nothing: Communicator decides on gloo
        self.comms = Communicators.over(self.mesh, self.clock, ordered=config.parallel.ordered_collectives is True)
        self._monitor = self.comms.watch(world, limit_s=config.parallel.divergence_timeout_s)
        wrap_blocks(model, config.parallel.activation_checkpointing, config.parallel.units)
        self.activations = self._offload_activations()
        optimizer = build_optimizer(config.optimizer.type, **config.optimizer.params.model_dump())
        settings = plan_settings(model, optimizer, model_parameters)  # before Parameters of a meta model are replaced
        zero = config.zero_optimization
        self.sharded = ShardedModel(
            model,
            policy=StagePolicy.for_stage(
                zero.stage, reduce_at_boundary=config.parallel.gradient_reduction == "boundary"
            ),
            comms=self.comms,
            device=world.device,
            precision=PrecisionPlan.from_config(model, config),
            options=ZeroOptions.from_config(config),
            values=choose_values(model, config.seed, self.comms.world),
            accumulation=self.batch.accumulation,
            unit_patterns=config.parallel.units,
            offload=ParameterOffload.from_config(config, lambda: self.host_memory, world.device, world.rank),
            rest_device=torch.device("cpu") if config.offloads_optimizer else None,
        )
        place_buffers(model, world.device, self.comms.world)
        params = config.optimizer.params
        hosting = Hosting.from_config(config, lambda: self.host_memory, world.local_world_size, world.rank)
        self.optimizer = (
            ShardedOptimizer(self.sharded, optimizer, settings, seed=config.seed)
            if hosting is None
            else HostedOptimizer(self.sharded, optimizer, settings, hosting=hosting, seed=config.seed)
        )
        scheduler = config.scheduler
        self.schedule = build_schedule(
            scheduler.type if scheduler else None, scheduler.params.model_dump() if scheduler else {}, params.lr
        )
        self.optimizer.set_betas(self.schedule.betas(1))
        self.average = None if ema_decay is None else ShardedAverage(self.sharded, ema_decay)
        self._hooks = install_hooks(self.sharded)
        self._max_skipped_in_row = max_skipped_in_row
        self.loss_scale = build_loss_scale(**config.fp16.model_dump())
        self.global_steps = 0
        self.micro_steps = 0
        self._within_step = 0
        self._joining: Joining | None = None
        self.skipped_steps = 0
        self.skipped_in_row = 0
        self.last_report: StepReport | None = None

    def _offload_activations(self) -> ActivationOffload | None:
        if not self.config.activation_checkpointing.cpu_checkpointing:
            return None
        offload = ActivationOffload(self.host_memory, self.world.device)
        if not offload_inputs(self.module, offload, self.config.parallel.units):
            _logger.warning(
                "activation_checkpointing.cpu_checkpointing has no effect: raydz recomputes no block of this model; "
                "set parallel.activation_checkpointing to full"
            )
        return offload

    # -- one step ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; floating-point tensors among the arguments are cast to the compute dtype.

        Raises:
            OffloadError: an update of offloaded weights has failed since.
        """
        self.optimizer.raise_failure()
        args, kwargs = self._cast(args), self._cast(kwargs)
        return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        dtype = self.sharded.precision.compute_dtype
        return map_tensors(value, lambda t: t.to(self.world.device, dtype if t.is_floating_point() else t.dtype))

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next (or running) micro-batch is the last of its step."""
        return self._within_step + 1 == self.batch.accumulation

    def backward(self, loss: Tensor, *, denominator: float | None = None) -> Tensor:
        """Run backward through `loss` and, in the step's last micro-batch, reduce the gradients over all ranks.

        Gradients are summed over micro-batches and ranks, after the loss is divided by `denominator`: the number of
        what it sums over the whole step. Without one the loss is a mean, and is divided by accumulation times ranks
        (DeepSpeed's mean of means).

        Shape: loss is a scalar. Collective: every rank, once for each forward.

        Raises:
            TrainingError: `loss` is no scalar with a graph, or was used before.
        """
        if loss.numel() != 1 or not loss.requires_grad:
            raise TrainingError(
                "backward needs a scalar loss with a graph",
                got=f"shape {tuple(loss.shape)}, requires_grad={loss.requires_grad}",
            )
        divisor = self._divisor(denominator)
        if self._joining is not None:
            self._joining.count(is_mean=denominator is None)
        is_last = self.is_gradient_accumulation_boundary()
        if is_last:
            self._expect_update()
        self.sharded.begin_backward(is_last=is_last)
        try:
            self._to_differentiate(loss, divisor).backward()
            self.sharded.end_backward()
        except BaseException:
            self.sharded.abort()
            self._within_step = 0  # the step's earlier micro-batches went with it
            raise
        return loss

    def _to_differentiate(self, loss: Tensor, divisor: float) -> Tensor:
        if self.loss_scale is None:
            return loss / divisor
        return loss.float() / divisor * self.loss_scale.scale

    def _expect_update(self) -> None:
        """Say what the step's update will be if it is neither clipped nor skipped; in a `join` nobody knows yet."""
        step, scaling = self.global_steps + 1, 1.0 if self.loss_scale is None else self.loss_scale.scale
        self.optimizer.expect(
            step=step, lr=self.schedule.lr(step), betas=self.schedule.betas(step),
            grad_scale=None if self._joining is not None else 1.0 / scaling,
        )  # fmt: skip

    def step(self) -> StepReport | None:
        """After a step's last micro-batch update the weights; after another one only count it.

        Returns:
            The report of the step, or None within accumulation.

        Collective: every rank. Blocking: the host waits for the gradient norm.

        Raises:
            TrainingError: too many non-finite steps in a row, with names of parameters; or states were moved away.
        """
        self.sharded.require_present("a step")
        at_boundary = self.is_gradient_accumulation_boundary()
        if self._joining is not None:
            self._joining.end_micro_batch()
        self.micro_steps += 1
        self._within_step = 0 if at_boundary else self._within_step + 1
        if not at_boundary:
            return None
        loss_scale = None if self.loss_scale is None else self.loss_scale.scale
        scaling = 1.0 if loss_scale is None else loss_scale
        if self._joining is not None:
            scaling *= self._joining.share(self.batch.accumulation * self.world.world_size)
        norm = self.optimizer.gradient_norm() / scaling
        lr = self.schedule.lr(self.global_steps + 1)
        skipped = not norm < float("inf")
        if self.loss_scale is not None:
            self.loss_scale = self.loss_scale.after(overflowed=skipped)
        if skipped:
            self._skip(norm)
        else:
            self.skipped_in_row = 0
            self.global_steps += 1
            scale = clip_scale(norm, self.config.gradient_clipping)
            self.optimizer.set_betas(self.schedule.betas(self.global_steps))
            self.before_change()
            self.optimizer.update(step=self.global_steps, lr=lr, grad_scale=scale / scaling)
            if self.average is not None:
                self.average.update()
        self.optimizer.clear_gradients()
        offload = with_waits(self.optimizer.offload_report(), self._take_copy_waits())
        self.last_report = StepReport(self.global_steps, lr, norm, skipped, loss_scale, offload)
        return self.last_report

    def _take_copy_waits(self) -> dict[str, float]:
        """Seconds that forward and backward waited for the host since the last step, by the names of `explain`."""
        waits = {"parameters": self.sharded.offload, "activations": self.activations}
        return {cause: offload.waits.take() for cause, offload in waits.items() if offload is not None}

    def discard_step(self) -> StepReport:
        """In place of `step` after a step's last micro-batch: drop its gradients and change nothing else.

        For what the gradients do not show and the caller knows, such as a loss spike. The schedule does not advance.

        Collective: every rank.

        Raises:
            TrainingError: no backward has run since the last step, or micro-batches of this one are to come; or in a
                `join`, where ranks without a batch would take the step.
        """
        self.sharded.require_present("a step")
        if self._joining is not None:
            raise TrainingError("a step is discarded within a join", wanted="engine.step(), which every rank makes")
        if not self.is_gradient_accumulation_boundary():
            raise TrainingError("a step is discarded after its last micro-batch", got=f"{self._within_step + 1} done")
        scaling = 1.0 if self.loss_scale is None else self.loss_scale.scale
        norm = self.optimizer.gradient_norm() / scaling
        if self.loss_scale is not None and not norm < float("inf"):
            self.loss_scale = self.loss_scale.after(overflowed=True)
        self.micro_steps += 1
        self._within_step = 0
        self.skipped_steps += 1
        self.optimizer.clear_gradients()
        used, lr = (None if self.loss_scale is None else scaling), self.schedule.lr(self.global_steps + 1)
        self.last_report = StepReport(self.global_steps, lr, norm, True, used)
        return self.last_report

    def _skip(self, norm: float) -> None:
        """Leave weights, states, step count and schedule as they are; end the training when it goes on like this."""
        self.skipped_steps += 1
        self.skipped_in_row += 1
        _logger.warning("step after %d skipped: gradient norm is %s", self.global_steps, norm)
        # A scale that can still fall answers an overflow; only what it cannot answer counts.
        in_row = self.skipped_in_row if self.loss_scale is None else self.loss_scale.stuck_steps
        if in_row < self._max_skipped_in_row:
            return
        local = "\n".join(self.optimizer.non_finite_parameters())
        everyone = self.comms.world.all_gather_bytes(local.encode())
        names = dict.fromkeys(name for part in everyone for name in part.decode().split("\n") if name)
        raise TrainingError(
            f"{in_row} steps in a row had gradients that are not finite",
            where=", ".join(list(names)[:5]), wanted="finite gradients",
            got=f"gradient norm {norm}" + (f" at loss scale {self.loss_scale.scale:g}" if self.loss_scale else ""),
            remedy="lower the learning rate, or look at the data of these steps",
        )  # fmt: skip

    def _divisor(self, denominator: float | None) -> float:
        return self.batch.accumulation * self.mesh.shape.batch_world_size if denominator is None else denominator

    def train(self, mode: bool = True) -> Engine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's mode to evaluation."""
        return self.train(False)

    def destroy(self) -> None:
        """Remove the hooks and process groups; buffers go with the last reference to the engine and the module.

        Blocking: until a save in the background has ended, good or bad (`close_saves` first to wait less).
        """
        self.close_saves()
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self._monitor.stop()
        self.optimizer.close()
        self.close_moves()
        if self.sharded.offload is not None:
            self.sharded.offload.close()
        if self.activations is not None:
            self.activations.close()
        self.mesh.close()


def initialize(
    model: nn.Module,
    config: EngineConfig | dict | str | Path,
    *,
    device: str = "auto",
    max_skipped_in_row: int = 20,
    ema_decay: float | None = None,
    model_parameters: Iterable[Any] | None = None,
) -> Engine:
    """Shard `model` over the ranks of this job (torchrun's, Ray Train's, or one) and return its Engine.

    Args:
        model: with values, or built under `torch.device("meta")`.
        config: a DeepSpeed configuration: dict, path of a JSON or YAML file, or `EngineConfig`.
        device: `auto`, `cpu` or `cuda`.
        ema_decay: keep a moving average of the weights.
        model_parameters: as `torch.optim` takes them: parameters, or groups of them (`params`, `lr`, `weight_decay`,
            `use_muon`). A group's lr follows the schedule in proportion to the optimizer's.

    Raises:
        ConfigError: the configuration is wrong or impossible here.
    """
    loaded = config if isinstance(config, EngineConfig) else load_engine(config)
    world = init_world(device, timeout_s=loaded.parallel.collective_timeout_s)
    return Engine(
        model, loaded, world, max_skipped_in_row=max_skipped_in_row, ema_decay=ema_decay,
        model_parameters=model_parameters,
    )  # fmt: skip

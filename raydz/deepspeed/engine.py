"""The engine under the names that DeepSpeed scripts call.

Neighbours: `initialize.py` makes it; `raydz.engine` does the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from raydz import log
from raydz.checkpoint import find_checkpoint
from raydz.deepspeed.refusals import refuse_arguments, refuse_name, refused_in
from raydz.deepspeed.views import OptimizerView, SchedulerView
from raydz.dist.agreement import on_rank_zero
from raydz.engine import Engine
from raydz.errors import ConfigError, TrainingError
from raydz.storage import open_store

_logger = log.get(__name__)
_LOAD_REMEDIES = {
    "load_optimizer_states": "a checkpoint is loaded whole: build a new engine around loaded weights",
    "load_lr_scheduler_states": "the schedule follows the step count of the checkpoint",
    "load_module_only": "use torch's load_state_dict on the module before initialize",
    "load_module_strict": "every tensor of the model must be there",
    "custom_load_fn": "load into the module before initialize",
    "exclude_frozen_parameters": "frozen parameters belong to the checkpoint",
}
ENGINES: WeakSet[DeepSpeedEngine] = WeakSet()
"""All that are alive: `zero.GatheredParameters` is given parameters and looks for theirs."""


class CountingEngine(Engine):
    """The engine, in which `no_sync` can take a backward out of the count of micro-batches."""

    is_unsynchronised = False

    def is_gradient_accumulation_boundary(self) -> bool:
        return not self.is_unsynchronised and super().is_gradient_accumulation_boundary()


class DeepSpeedEngine:
    """What `deepspeed.initialize` returns first; other attributes are the module's, as in DeepSpeed.

    Attributes:
        raydz: the engine itself.
        optimizer, lr_scheduler: views.
        training_dataloader: None without `training_data`.
    """

    def __init__(self, engine: CountingEngine, groups: list[dict[str, Any]]) -> None:
        self.raydz = engine
        self.module: nn.Module = engine.module
        self.optimizer = OptimizerView(self, groups)
        self.lr_scheduler = SchedulerView(self)
        self.training_dataloader: Any = None
        ENGINES.add(self)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name in ("raydz", "module"):
            raise AttributeError(name)
        if name not in refused_in("DeepSpeedEngine") and hasattr(self.module, name):
            return getattr(self.module, name)
        refuse_name(name, "DeepSpeedEngine")

    # -- one step ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self.raydz(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward."""
        return self.raydz(*args, **kwargs)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Run backward through the mean loss of a micro-batch. Collective.

        Args:
            scale_wrt_gas: False leaves out the division by accumulation.

        Raises:
            ConfigError: `retain_graph`.
        """
        remedies = {"retain_graph": "add up the losses and call backward once"}
        refuse_arguments("engine.backward", remedies, {"retain_graph": retain_graph})
        ranks = self.raydz.mesh.shape.batch_world_size
        return self.raydz.backward(loss, denominator=None if scale_wrt_gas else ranks)

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> None:
        """Update at a boundary of accumulation, else only count. Collective.

        Raises:
            TrainingError: within `no_sync`.
        """
        refuse_arguments(
            "engine.step", {"lr_kwargs": "the schedule is a function of the step"}, {"lr_kwargs": lr_kwargs}
        )
        if self.raydz.is_unsynchronised:
            raise TrainingError("a step within no_sync", where="engine.step()", remedy="call it after the block")
        self.raydz.step()

    def zero_grad(self) -> None:
        """Nothing: `step` drops the gradients."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add up gradients of further backwards without reducing or counting them; stages 0 and 1, as in DeepSpeed.

        Dtype: they add up in the compute dtype where gradient_accumulation_steps is 1.

        Raises:
            ConfigError: stage 2 or 3. TrainingError: a block within a block.
        """
        if self.zero_optimization_stage() >= 2:
            raise ConfigError(
                "gradients that are sharded are reduced in every backward", where="engine.no_sync()",
                got=f"stage {self.zero_optimization_stage()}", wanted="stage 0 or 1",
                remedy="set gradient_accumulation_steps; parallel.gradient_reduction: boundary reduces once a step",
            )  # fmt: skip
        if self.raydz.is_unsynchronised:
            raise TrainingError("no_sync within no_sync", where="engine.no_sync()")
        self.raydz.is_unsynchronised = True
        try:
            yield
        finally:
            self.raydz.is_unsynchronised = False

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next (or running) micro-batch is the last of its step."""
        return self.raydz.is_gradient_accumulation_boundary()

    def train(self, mode: bool = True) -> DeepSpeedEngine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> DeepSpeedEngine:
        """Set the module's mode to evaluation."""
        return self.train(False)

    def destroy(self) -> None:
        """Remove the hooks and process groups."""
        self.raydz.destroy()

    def offload_states(
        self, include: Any = None, device: Any = "cpu", pin_memory: bool = True, non_blocking: bool = False
    ) -> None:
        """Move states to host memory until `reload_states`; `include` as DeepSpeed's enumeration or its names."""
        self.raydz.offload_states(include, device, pin_memory, non_blocking)

    def reload_states(self, non_blocking: bool = False) -> None:
        """Bring back what `offload_states` moved away."""
        self.raydz.reload_states(non_blocking)

    # -- what scripts ask --------------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        return self.raydz.batch.global_batch

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.raydz.batch.micro_batch

    def gradient_accumulation_steps(self) -> int:
        return self.raydz.batch.accumulation

    def gradient_clipping(self) -> float:
        return self.raydz.config.gradient_clipping

    def zero_optimization_stage(self) -> int:
        return self.raydz.config.zero_optimization.stage

    def zero_optimization(self) -> bool:
        return self.zero_optimization_stage() > 0

    def bfloat16_enabled(self) -> bool:
        return self.raydz.config.bf16.enabled

    def get_lr(self) -> list[float]:
        """The rate of the next step, a number for each parameter group."""
        config, rate = self.raydz.config, self.raydz.schedule.lr(self.global_steps + 1)
        base = config.optimizer.params.lr
        return [rate if group_lr == base else rate * group_lr / base for group_lr in self.optimizer.base_rates]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the last step's gradient before clipping; None before the first step."""
        report = self.raydz.last_report
        return None if report is None else report.grad_norm

    def was_step_applied(self) -> bool:
        """Whether the last step updated the weights."""
        report = self.raydz.last_report
        return report is not None and not report.skipped

    @property
    def global_steps(self) -> int:
        return self.raydz.global_steps

    @property
    def micro_steps(self) -> int:
        return self.raydz.micro_steps

    @property
    def skipped_steps(self) -> int:
        return self.raydz.skipped_steps

    @property
    def global_samples(self) -> int:
        return self.global_steps * self.train_batch_size()

    @property
    def device(self) -> torch.device:
        return self.raydz.world.device

    @property
    def local_rank(self) -> int:
        return self.raydz.world.local_rank

    @property
    def global_rank(self) -> int:
        return self.raydz.world.rank

    @property
    def world_size(self) -> int:
        return self.raydz.world.world_size

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save and commit, in raydz's format; True.

        Args:
            tag: name of the checkpoint's folder; None is `step-<committed steps>`.
            client_state: JSON-serialisable.
            save_latest: also write `<save_dir>/latest`, which holds the tag.

        Collective and blocking.

        Raises:
            CheckpointError: on every rank, if any could not write.
        """
        refuse_arguments(
            "engine.save_checkpoint", _LOAD_REMEDIES, {"exclude_frozen_parameters": exclude_frozen_parameters}
        )
        uri = self.raydz.save_checkpoint(save_dir, tag, client_state)
        if save_latest:
            on_rank_zero(self.raydz.comms.world, lambda: _write_latest(str(save_dir), uri.rsplit("/", 1)[1]))
        return True

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load weights, optimizer states and counters; (URI, client_state).

        Args:
            tag: None is what `latest` names, or the newest; where there is none, (None, None) after a warning.

        Collective and blocking.

        Raises:
            CheckpointError: the named one is not there, is damaged, or is another model's.
            ConfigError: only a part of it is asked for.
        """
        given = {
            "load_module_strict": not load_module_strict, "load_optimizer_states": not load_optimizer_states,
            "load_lr_scheduler_states": not load_lr_scheduler_states, "load_module_only": load_module_only,
            "custom_load_fn": custom_load_fn,
        }  # fmt: skip
        refuse_arguments("engine.load_checkpoint", _LOAD_REMEDIES, given)
        chosen = tag or on_rank_zero(self.raydz.comms.world, lambda: _newest(str(load_dir)))
        if chosen is None:
            _logger.warning("no checkpoint in %s: training starts from the beginning", load_dir)
            return None, None
        return self.raydz.load_checkpoint(load_dir, chosen)

    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write whole weights in the compute dtype to one safetensors file, and return True.

        False, after a warning, at stage 3 where `stage3_gather_16bit_weights_on_model_save` is false. Collective.

        Raises:
            ConfigError: another kind of file is asked for: nothing is pickled.
        """
        zero = self.raydz.config.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            _logger.warning("%s not saved: stage3_gather_16bit_weights_on_model_save is false", save_filename)
            return False
        self.raydz.save_16bit_model(save_dir, save_filename, exclude_frozen=exclude_frozen_parameters)
        return True

    save_fp16_model = save_16bit_model


def _write_latest(save_dir: str, tag: str) -> None:
    open_store(save_dir).put(_LATEST, tag.encode())


def _newest(load_dir: str) -> str | None:
    store = open_store(load_dir)
    return store.get(_LATEST).decode().strip() if store.exists(_LATEST) else find_checkpoint(store)


_LATEST = "latest"

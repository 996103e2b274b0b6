"""The public Engine: forward, backward, step over a sharded module, in DeepSpeed's manner.

Neighbours: `train/loop.py` drives it; `zero/sharded.py` does the sharding, `zero/update.py` the step;
`checkpoint/` saves and loads it. Needs neither ray nor mlflow nor boto3.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from raydz import log
from raydz.checkpoint import (
    Manifest,
    SaveRequest,
    checkpoint_uri,
    load_pieces,
    open_checkpoint,
    save,
    state_pieces,
    step_folder,
)
from raydz.config import EngineConfig, check_trainable, load_engine
from raydz.dist import CommClock, Communicator, Mesh, MeshShape, World, init_world
from raydz.dist.agreement import on_every_rank, on_rank_zero
from raydz.errors import TrainingError
from raydz.optim import build_optimizer, build_schedule, clip_scale
from raydz.storage import S3Options, Store, open_store
from raydz.zero import (
    Communicators,
    ShardedModel,
    ShardedOptimizer,
    StagePolicy,
    ZeroOptions,
    install_hooks,
)
from raydz.zero.export import full_parameters, gathered
from raydz.zero.initialize import choose_values

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_COUNTERS = ("global_steps", "micro_steps", "skipped_steps", "skipped_in_row")
_logger = log.get(__name__)


@dataclass(frozen=True)
class StepReport:
    """What one optimizer step did.

    Attributes:
        step: committed steps after it.
        lr: the rate it ran at.
        grad_norm: global norm before clipping.
        skipped: the gradients were not finite, and nothing was changed.
    """

    step: int
    lr: float
    grad_norm: float
    skipped: bool


class Engine:
    """A module whose state is sharded over ranks, and the optimizer that trains it.

    Args:
        model: replaced in place: its parameters become views of sharded buffers.
        config: DeepSpeed's sections, see `raydz.config`.
        world: this process among all; `raydz.initialize` finds it.
        max_skipped_in_row: so many non-finite steps in a row end the training.

    Collective: every rank builds its engine at the same point, with the same arguments.

    Raises:
        ConfigError: an impossible configuration for this world.
    """

    def __init__(self, model: nn.Module, config: EngineConfig, world: World, *, max_skipped_in_row: int = 20) -> None:
        check_trainable(config)
        self.config, self.world, self.module = config, world, model
        self.mesh = Mesh(MeshShape.for_world(world.world_size), world.rank)
        self.batch = config.batch(self.mesh.shape.batch_world_size)
        self.clock = CommClock(world.device)
        self.comms = self._communicators()
        zero = config.zero_optimization
        self.sharded = ShardedModel(
            model,
            policy=StagePolicy.for_stage(
                zero.stage, reduce_at_boundary=config.parallel.gradient_reduction == "boundary"
            ),
            comms=self.comms,
            device=world.device,
            compute_dtype=_DTYPES[config.compute_dtype],
            options=_zero_options(config),
            values=choose_values(model, config.seed, self.comms.gather),
            accumulation=self.batch.accumulation,
            unit_patterns=config.parallel.units,
        )
        self._move_buffers()
        params = config.optimizer.params
        self.optimizer = ShardedOptimizer(
            self.sharded,
            build_optimizer(config.optimizer.type, **params.model_dump()),
        )
        scheduler = config.scheduler
        self.schedule = build_schedule(
            scheduler.type if scheduler else None, scheduler.params.model_dump() if scheduler else {}, params.lr
        )
        self._hooks = install_hooks(self.sharded)
        self._max_skipped_in_row = max_skipped_in_row
        self.global_steps = 0
        self.micro_steps = 0
        self._within_step = 0
        self.skipped_steps = 0
        self.skipped_in_row = 0
        self.last_report: StepReport | None = None

    def _communicators(self) -> Communicators:
        wanted = self.config.parallel.ordered_collectives
        ordered = wanted is True  # "auto" is ordered where it costs nothing: Communicator decides on gloo
        return Communicators(
            gather=Communicator(self.mesh.gather_group, ordered=ordered, clock=self.clock),
            reduce=Communicator(self.mesh.reduce_group, ordered=ordered, clock=self.clock),
        )

    def _move_buffers(self) -> None:
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved = buffer.to(self.world.device).contiguous()
                    self.comms.gather.broadcast(moved)

    # -- one step ----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward; floating-point tensors among the arguments are cast to the compute dtype."""
        args, kwargs = self._cast(args), self._cast(kwargs)
        return self.module(*args, **kwargs)

    def _cast(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            value = value.to(self.world.device)
            return value.to(self.sharded.compute_dtype) if value.is_floating_point() else value
        if isinstance(value, (tuple, list)):
            items = [self._cast(item) for item in value]
            return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
        if isinstance(value, dict):
            return {key: self._cast(item) for key, item in value.items()}
        return value

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
        divisor = denominator
        if divisor is None:
            divisor = self.batch.accumulation * self.mesh.shape.batch_world_size
        self.sharded.begin_backward(is_last=self.is_gradient_accumulation_boundary())
        try:
            (loss / divisor).backward()
            self.sharded.end_backward()
        except BaseException:
            self.sharded.abort()
            self._within_step = 0  # the step's earlier micro-batches went with it
            raise
        return loss

    def step(self) -> StepReport | None:
        """After a step's last micro-batch update the weights; after another one only count it.

        Returns:
            The report of the step, or None within accumulation.

        Collective: every rank. Blocking: the host waits for the gradient norm.

        Raises:
            TrainingError: too many non-finite steps in a row; names parameters.
        """
        at_boundary = self.is_gradient_accumulation_boundary()
        self.micro_steps += 1
        self._within_step = 0 if at_boundary else self._within_step + 1
        if not at_boundary:
            return None
        norm = self.optimizer.gradient_norm()
        lr = self.schedule.lr(self.global_steps + 1)
        skipped = not norm < float("inf")
        if skipped:
            self._skip(norm)
        else:
            self.skipped_in_row = 0
            self.global_steps += 1
            scale = clip_scale(norm, self.config.gradient_clipping)
            self.optimizer.update(step=self.global_steps, lr=lr, grad_scale=scale)
        self.optimizer.clear_gradients()
        self.last_report = StepReport(self.global_steps, lr, norm, skipped)
        return self.last_report

    def _skip(self, norm: float) -> None:
        """Leave weights, states, step count and schedule as they are; end the training when it goes on like this."""
        self.skipped_steps += 1
        self.skipped_in_row += 1
        _logger.warning("step after %d skipped: gradient norm is %s", self.global_steps, norm)
        if self.skipped_in_row < self._max_skipped_in_row:
            return
        local = "\n".join(self.optimizer.non_finite_parameters())
        everyone = self.comms.reduce.all_gather_bytes(local.encode())
        names = dict.fromkeys(name for part in everyone for name in part.decode().split("\n") if name)
        raise TrainingError(
            f"{self.skipped_in_row} steps in a row had gradients that are not finite",
            where=", ".join(list(names)[:5]), got=f"gradient norm {norm}", wanted="finite gradients",
            remedy="lower the learning rate, or look at the data of these steps",
        )  # fmt: skip

    # -- whole parameters --------------------------------------------------------------------------------------

    def settle(self) -> None:
        """Await everything outstanding: afterwards no transfer touches the engine's buffers. Collective."""
        self.sharded.release_all()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Let the module's parameters show whole values within the block (read only). Collective."""
        with gathered(self.sharded):
            yield

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole fp32 parameters by name (tied ones once), and buffers, on the CPU of rank 0; empty elsewhere.

        Collective: every rank. Memory: one flat group at a time, and the result on rank 0.
        """
        keep = self.world.rank == 0
        state = {}
        for name, tensor in full_parameters(self.sharded):
            if keep:
                state[name] = tensor.cpu()
        if keep:
            state.update({name: buffer.cpu() for name, buffer in self.module.named_buffers()})
        return state

    # -- checkpoints -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        options: S3Options | None = None,
    ) -> str:
        """Save everything that training needs to go on, and commit it; returns the checkpoint's URI.

        Args:
            save_dir: folder or `s3://bucket/prefix`.
            tag: name of the checkpoint's folder; None is `step-<committed steps>`.
            client_state: JSON-serialisable, comes back from `load_checkpoint`.

        Collective and blocking: every rank, between steps.

        Raises:
            CheckpointError: on every rank, if any could not write; no earlier checkpoint is touched.
        """
        store = open_store(str(save_dir), options)
        folder = tag or step_folder(self.global_steps)
        self.save_to(store, folder, step=self.global_steps, state={"client": dict(client_state or {})})
        return checkpoint_uri(store, folder)

    def save_to(self, store: Store, folder: str, *, step: int, state: Mapping[str, Any]) -> None:
        """`save_checkpoint` into an open store, with the caller's own step number and state."""
        if self._within_step:
            raise TrainingError(
                "a checkpoint within accumulation would lose gradients", got=f"{self._within_step} micro-batches done",
                wanted="a call right after an optimizer step",
            )  # fmt: skip
        self.settle()
        counters = {name: getattr(self, name) for name in _COUNTERS}
        aliases = {alias: spec.name for group in self.sharded.groups for spec in group.specs for alias in spec.aliases}
        pieces = state_pieces(self.sharded, self.optimizer, saving=True)
        save(SaveRequest(store, folder, step, pieces, aliases, {**state, "engine": counters}), self.comms.gather)

    def load_checkpoint(
        self, load_dir: str | Path, tag: str | None = None, *, options: S3Options | None = None
    ) -> tuple[str, dict[str, Any]]:
        """Load masters, optimizer states and counters, whatever stage and world size saved them.

        Args:
            load_dir: a checkpoint, or a folder whose newest committed one is taken.
            tag: exactly this checkpoint of the folder.

        Returns:
            The URI of the checkpoint and the `client_state` it was saved with.

        Collective and blocking: every rank.

        Raises:
            CheckpointError: on every rank: there is none, or it does not fit the model, and the engine is as before;
                or it is damaged, and the engine must not be used before another load.
        """
        store = open_store(str(load_dir), options)
        comm = self.comms.gather
        folder = on_rank_zero(comm, lambda: open_checkpoint(store, tag or "")[0])  # "newest" may change meanwhile
        manifest = on_every_rank(comm, lambda: open_checkpoint(store, folder)[1])
        on_every_rank(comm, lambda: self.load_from(store, folder, manifest))
        return checkpoint_uri(store, folder), dict(manifest.state.get("client", {}))

    def load_from(self, store: Store, folder: str, manifest: Manifest) -> int:
        """Load an opened checkpoint; returns the bytes this rank read. Nothing in it is collective."""
        self.settle()
        num_bytes = load_pieces(store, folder, manifest, state_pieces(self.sharded, self.optimizer, saving=False))
        for group in self.sharded.groups:
            group.mark_updated()
        self.optimizer.clear_gradients()  # of a step that had begun
        self._within_step = 0
        for name in _COUNTERS:
            setattr(self, name, manifest.state["engine"][name])
        return num_bytes

    def train(self, mode: bool = True) -> Engine:
        """Set the module's mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's mode to evaluation."""
        return self.train(False)

    def destroy(self) -> None:
        """Remove the hooks and process groups; buffers go with the last reference to the engine and the module."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()
        self.mesh.close()


def _zero_options(config: EngineConfig) -> ZeroOptions:
    zero = config.zero_optimization
    sizes = [size for size in (zero.reduce_bucket_size, zero.allgather_bucket_size) if size is not None]
    wire = config.communication_data_type
    return ZeroOptions(
        bucket_numel=min(sizes) if sizes else None,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        persistence_numel=zero.stage3_param_persistence_threshold,
        max_live_numel=zero.stage3_max_live_parameters,
        wire_dtype=None if wire is None else _DTYPES[wire],
    )


def initialize(
    model: nn.Module, config: EngineConfig | dict | str | Path, *, device: str = "auto", max_skipped_in_row: int = 20
) -> Engine:
    """Shard `model` over the ranks of this job (torchrun's, Ray Train's, or one) and return its Engine.

    Args:
        model: with values, or built under `torch.device("meta")`.
        config: a DeepSpeed configuration: dict, path of a JSON or YAML file, or `EngineConfig`.
        device: `auto`, `cpu` or `cuda`.

    Raises:
        ConfigError: the configuration is wrong or impossible here.
    """
    loaded = config if isinstance(config, EngineConfig) else load_engine(config)
    world = init_world(device, timeout_s=loaded.parallel.collective_timeout_s)
    return Engine(model, loaded, world, max_skipped_in_row=max_skipped_in_row)

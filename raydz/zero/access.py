"""The part of the public Engine that reaches whole parameters: to read, change, load, freeze and unfreeze them.

Neighbours: `engine.py` inherits it; `export.py` and `regroup.py` do the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from raydz.config import EngineConfig
from raydz.dist import World
from raydz.errors import ConfigError, TrainingError
from raydz.storage import S3Options, open_store
from raydz.zero.average import ShardedAverage
from raydz.zero.export import full_parameters, gathered, load_full, modified
from raydz.zero.group import FlatGroup
from raydz.zero.hooks import install_hooks
from raydz.zero.regroup import GroupState, change_trainable
from raydz.zero.sharded import ShardedModel
from raydz.zero.states import GroupStates
from raydz.zero.update import ShardedOptimizer
from raydz.zero.weights_file import save_weights


class ParameterAccess:
    """Whole parameters of a sharded module, between steps."""

    config: EngineConfig
    module: nn.Module
    sharded: ShardedModel
    optimizer: ShardedOptimizer
    world: World
    average: ShardedAverage | None
    before_change: Callable[[], None]
    """Waits until nothing else reads the weights and states, such as a save in the background."""
    _hooks: list
    _within_step: int

    @contextmanager
    def gathered(self, names: Sequence[str] | str | None = None, *, modify: bool = False) -> Iterator[None]:
        """Let the module's parameters show whole values within the block.

        Args:
            names: parameters or modules, by name or pattern (fnmatch); None for all. What shares a flat group with
                them is gathered too.
            modify: show the fp32 masters, and keep what rank 0 makes of them, to the last bit; `load_state_dict` and
                assignments to `.data` count, a forward is refused. Nothing is kept when the block raises.

        A numpy array of a parameter may be held past the block: at stage 3 it keeps its memory and values.

        Collective: every rank. Memory: what is gathered, on every rank.

        Raises:
            ConfigError: a pattern matches nothing.
        """
        self._require_between_steps("parameters are changed" if modify else None)
        if modify:
            self.before_change()
        with modified(self.sharded, names) if modify else gathered(self.sharded, names):
            yield

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Compute with the moving average of the weights within the block, between steps. Collective.

        Raises:
            ConfigError: the engine keeps none.
        """
        if self.average is None:
            raise ConfigError("there is no average of the weights", where="ema_decay", got="None", wanted="a decay")
        self.sharded.require_present("computing with the average")
        self.before_change()
        self.sharded.release_all()
        with self.average.in_place_of_weights():
            try:
                yield
            finally:
                self.sharded.release_all()  # no gather of the average may end after the weights are back

    def full_state_dict(self) -> dict[str, Tensor]:
        """Whole parameters by name (tied ones once), and buffers, on the CPU of rank 0; empty elsewhere.

        Dtype: fp32 of what is trained, or bf16 where that is the master; frozen parameters as they are kept.
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

    def save_16bit_model(
        self,
        save_dir: str | Path,
        filename: str = "model.safetensors",
        *,
        exclude_frozen: bool = False,
        options: S3Options | None = None,
    ) -> None:
        """Write whole weights in the dtype that forward reads, and persistent buffers, to one safetensors file.

        Args:
            save_dir: folder or `s3://bucket/prefix`; a file of this name is replaced.

        Collective and blocking: every rank. Memory: one flat group at a time.

        Raises:
            ConfigError: stage 3 without `stage3_gather_16bit_weights_on_model_save`, or not a `.safetensors` name.
            StorageError: on every rank: it could not be written, and there is no file.
        """
        zero = self.config.zero_optimization
        if zero.stage == 3 and not zero.stage3_gather_16bit_weights_on_model_save:
            raise ConfigError(
                "whole weights are not gathered for saving",
                where="zero_optimization.stage3_gather_16bit_weights_on_model_save", got="false", wanted="true",
                remedy="save_checkpoint saves shards, which any stage and number of ranks loads",
            )  # fmt: skip
        if not filename.endswith(".safetensors"):
            raise ConfigError(
                "weights are saved as safetensors", where="save_16bit_model(filename=…)", got=filename,
                wanted="model.safetensors, for example",
            )  # fmt: skip
        self.sharded.release_all()
        save_weights(self.sharded, open_store(str(save_dir), options), filename, trained_only=exclude_frozen)

    def load_full_state_dict(self, state: Mapping[str, Tensor] | None, *, strict: bool = True) -> None:
        """Set parameters (their masters, exactly) and buffers from rank 0's `state`; optimizer states stay.

        Args:
            state: as `full_state_dict` or a module's `state_dict` gives it; on other ranks it is not looked at.
            strict: every parameter and persistent buffer must be there, and nothing else.

        Collective: every rank, between steps. Memory: one flat group at a time.

        Raises:
            LayoutError: on every rank: names or shapes do not fit, and nothing is changed.
        """
        self._require_between_steps("a state is loaded")
        self.before_change()
        load_full(self.sharded, state, strict=strict)
        if self.average is not None:
            self.average.restart()

    def set_trainable(self, names: Sequence[str] | str, trainable: bool) -> None:
        """Freeze or unfreeze parameters from the next step on.

        Newly trained ones begin with optimizer states of zero; the step count is the engine's. Freezing under bf16 and
        fp16 rounds the masters to the compute dtype. A checkpoint is loaded into an engine that trains the same
        parameters. A moving average of the weights begins anew in the units concerned.

        Args:
            names: parameters or modules, by name or pattern (fnmatch).

        Collective: every rank, between steps. Memory: one unit, whole, at a time, and the optimizer states twice.

        Raises:
            ConfigError: a pattern matches nothing.
            LayoutError: a parameter is not of a dtype that can be trained.
            TrainingError: the step's first micro-batches have run.
        """
        self._require_between_steps("parameters are frozen or unfrozen")
        self.sharded.require_present("freezing or unfreezing")
        self.before_change()
        old, kinds = self.optimizer, self.optimizer.state_kinds()
        states = dict(zip((id(group) for group in old.groups), old.group_states, strict=True))
        formed = change_trainable(
            self.sharded, names, trainable, lambda group: _element_by_element(group, states[id(group)], kinds)
        )
        self.optimizer = old.rebuilt()
        new = dict(zip((id(group) for group in self.optimizer.groups), self.optimizer.group_states, strict=True))
        for group, carried in formed:
            _put(group, new[id(group)], carried)
        if self.average is not None:
            self.average = self.average.rebuilt(self.sharded)
        for handle in self._hooks:
            handle.remove()
        self._hooks[:] = install_hooks(self.sharded)

    def _require_between_steps(self, what: str | None) -> None:
        if what is not None and self._within_step:
            raise TrainingError(
                f"{what} within accumulation", got=f"{self._within_step} micro-batches done",
                wanted="a call right after an optimizer step",
            )  # fmt: skip


def _element_by_element(group: FlatGroup, states: GroupStates, kinds: Sequence[str]) -> GroupState:
    """All kinds of state as long as what the rank owns; zero where a parameter has not got one."""
    start, stop = group.owned
    own = {kind: torch.zeros(stop - start, dtype=torch.float32, device=group.device) for kind in kinds}
    for part in group.layout.intervals(start, stop):
        end = part.offset + part.stop - part.start
        for kind, values in states.of(part.offset, end).items():
            own[kind][part.offset : end] = values
    return own


def _put(group: FlatGroup, states: GroupStates, own: GroupState) -> None:
    """Undo `_element_by_element`."""
    for part in group.layout.intervals(*group.owned):
        end = part.offset + part.stop - part.start
        for kind, values in states.of(part.offset, end).items():
            if kind in own:
                values.copy_(own[kind][part.offset : end])

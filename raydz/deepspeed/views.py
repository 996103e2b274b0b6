"""What a script sees as `optimizer` and `lr_scheduler`: views of the engine, which steps both itself.

Neighbours: `initialize.py` returns them in the 4-tuple. `step` and `zero_grad` do nothing, as DeepSpeed's own scripts
leave them to `engine.step()`; a write is refused, because it would not reach the update.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from raydz.errors import ConfigError

if TYPE_CHECKING:
    from raydz.deepspeed.engine import DeepSpeedEngine


class ParameterGroup(dict):
    """One of `optimizer.param_groups`, to read."""

    def _refuse(self, name: object) -> NoReturn:
        raise ConfigError(
            "a parameter group is a view", where=f"optimizer.param_groups[…][{name!r}]", got="a new value",
            remedy="set the rate by the configuration's scheduler, or give initialize a LambdaLR",
        )  # fmt: skip

    def __setitem__(self, name: Any, value: Any) -> NoReturn:
        self._refuse(name)

    def update(self, *values: Any, **named: Any) -> NoReturn:
        self._refuse(", ".join(named) or "…")


class OptimizerView:
    """`optimizer` of the 4-tuple.

    Args:
        groups: as the script grouped its parameters: names as `params`, `lr` (its base rate) and what else it gave.
    """

    def __init__(self, engine: DeepSpeedEngine, groups: list[dict[str, Any]]) -> None:
        self._engine, self._groups = engine, groups

    @property
    def param_groups(self) -> list[ParameterGroup]:
        """The groups with the rate that the next step uses."""
        members = dict(self._engine.module.named_parameters())
        return [
            ParameterGroup({**group, "params": [members[name] for name in group["params"]], "lr": lr})
            for group, lr in zip(self._groups, self._engine.get_lr(), strict=True)
        ]

    @property
    def base_rates(self) -> list[float]:
        """Each group's rate before any schedule."""
        return [group["lr"] for group in self._groups]

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: `engine.step()` updates."""

    def zero_grad(self, *_: Any, **__: Any) -> None:
        """Nothing: `engine.step()` drops the gradients."""

    def state_dict(self) -> NoReturn:
        """Refused: `engine.save_checkpoint` holds the states of all ranks."""
        raise ConfigError(
            "optimizer states are sharded", where="optimizer.state_dict()", remedy="use engine.save_checkpoint"
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> NoReturn:
        """Refused: `engine.load_checkpoint` brings them back."""
        raise ConfigError(
            "optimizer states are sharded", where="optimizer.load_state_dict()", remedy="use engine.load_checkpoint"
        )


class SchedulerView:
    """`lr_scheduler` of the 4-tuple: the rate is a function of the committed steps, so there is no state."""

    def __init__(self, engine: DeepSpeedEngine) -> None:
        self._engine = engine

    def get_lr(self) -> list[float]:
        """The rate of the next step, a number for each parameter group."""
        return self._engine.get_lr()

    def get_last_lr(self) -> list[float]:
        """The same: in DeepSpeed the scheduler has been stepped at the end of the step before."""
        return self._engine.get_lr()

    def step(self, *_: Any, **__: Any) -> None:
        """Nothing: a committed step of the engine advances the schedule."""

    def state_dict(self) -> dict[str, Any]:
        """Where the schedule stands, to look at; a checkpoint of the engine needs none."""
        return {"last_batch_iteration": self._engine.global_steps - 1}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing: a loaded checkpoint has set the step count.

        Raises:
            ConfigError: the state is another step's.
        """
        if dict(state) != self.state_dict():
            raise ConfigError(
                "the schedule follows the engine's steps", where="lr_scheduler.load_state_dict()", got=dict(state),
                wanted=self.state_dict(), remedy="load the engine's checkpoint",
            )  # fmt: skip

"""The ZeRO stage as a policy: two questions, asked per flat group. Nothing else in raydz asks for the stage.

Neighbours: `sharded.py` makes one from the configuration; `group.py` obeys it.
"""

from __future__ import annotations

from dataclasses import dataclass

from raydz.errors import ConfigError


@dataclass(frozen=True)
class StagePolicy:
    """What a flat group keeps after use.

    Args:
        keeps_parameters: the gathered parameters stay after forward and backward (stages 0, 1, 2).
        keeps_gradients: full gradients stay between micro-batches and are reduced once, in the last one's backward
            (stages 0 and 1; 2 and 3 with reduction at the boundary).
        shards_state: masters and optimizer states are sharded (stages 1, 2, 3).
        frees_gradients: the full gradient buffer is given back after its reduction (stages 2 and 3).
    """

    keeps_parameters: bool
    keeps_gradients: bool
    shards_state: bool
    frees_gradients: bool

    @classmethod
    def for_stage(cls, stage: int, *, reduce_at_boundary: bool) -> StagePolicy:
        """Stage 0 shards nothing, 1 optimizer state, 2 gradients too, 3 parameters too.

        Raises:
            ConfigError: the stage is not 0, 1, 2 or 3.
        """
        if stage not in (0, 1, 2, 3):
            raise ConfigError("unknown ZeRO stage", where="zero_optimization.stage", got=stage, wanted="0, 1, 2 or 3")
        return cls(
            keeps_parameters=stage < 3,
            keeps_gradients=stage < 2 or reduce_at_boundary,
            shards_state=stage > 0,
            frees_gradients=stage > 1,
        )

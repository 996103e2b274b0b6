"""The stage is two questions and what follows from them."""

from __future__ import annotations

import pytest

from raydz.errors import ConfigError
from raydz.zero import StagePolicy

# stage, at the boundary: keeps parameters, keeps gradients, shards state, frees gradients
TABLE = {
    (0, False): (True, True, False, False),
    (1, False): (True, True, True, False),
    (2, False): (True, False, True, True),
    (3, False): (False, False, True, True),
    (0, True): (True, True, False, False),
    (1, True): (True, True, True, False),
    (2, True): (True, True, True, True),
    (3, True): (False, True, True, True),
}


@pytest.mark.parametrize(("key", "wanted"), TABLE.items())
def test_each_stage_keeps_what_its_row_says(key: tuple[int, bool], wanted: tuple[bool, ...]) -> None:
    stage, at_boundary = key
    policy = StagePolicy.for_stage(stage, reduce_at_boundary=at_boundary)
    found = (policy.keeps_parameters, policy.keeps_gradients, policy.shards_state, policy.frees_gradients)
    assert found == wanted


@pytest.mark.parametrize("stage", [-1, 4])
def test_another_stage_is_refused(stage: int) -> None:
    with pytest.raises(ConfigError, match="unknown ZeRO stage"):
        StagePolicy.for_stage(stage, reduce_at_boundary=False)

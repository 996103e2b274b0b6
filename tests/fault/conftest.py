"""What the fault tests compare with."""

from __future__ import annotations

import pytest

from tests.support.runs import losses, small_config, start_driver


@pytest.fixture(scope="session")
def straight(ray_cluster, tmp_path_factory) -> dict[int, float]:
    """Losses of the run that nothing happened to."""
    root = tmp_path_factory.mktemp("straight")
    options = {"config": small_config(root, "straight"), "loss": "slow_loss"}
    process = start_driver(options, root / "driver", ray_cluster.env)
    assert process.wait(timeout=240) == 0, (root / "driver" / "driver.log").read_text()[-3000:]
    return losses(root, "straight")

"""Host memory of saves behind training: the plan against the image that a real engine saves from."""

from __future__ import annotations

from typing import Any

import pytest

from raydz.config import Config
from raydz.plan import decoder_planner
from tests.plan.test_memory import config_of


def measure_image(rank: int, world_size: int, config: Config, folder: str) -> tuple[int, int]:
    """Bytes of this rank's image after a real save of a real engine, and of the file's header in it."""
    import raydz.engine
    from raydz.train.build import build_model

    engine = raydz.engine.initialize(
        build_model(config, 0, None), config.engine(), device="cpu", ema_decay=config.train.ema_decay
    )
    engine.save_checkpoint(folder, async_save=True).result(60)
    image: Any = engine._saves._image  # type: ignore[union-attr]
    header = 8 + int.from_bytes(image.view[:8], "little")
    found = (image.num_bytes, header)
    engine.destroy()
    return found


def compare(ranks, world: int, config: Config, folder, *, padding: int = 0) -> None:
    """Each rank's image without its header is what was planned, but for padding of flat groups at the last rank."""
    planned = decoder_planner(config, "cpu").at(world).snapshot_bytes
    images = [total - header for total, header in ranks(world).run(measure_image, config, str(folder))]
    assert planned > 0 and all(planned - padding <= found <= planned for found in images), (planned, images)


@pytest.mark.parametrize(
    ("stage", "sections"),
    [
        (0, {}),
        (3, {}),
        (2, {"bf16": {"enabled": True}}),
        (1, {"fp16": {"enabled": True}}),
        (3, {"bf16": {"enabled": True, "bf16_optimizer_states": True}, "train": {"ema_decay": 0.9}}),
        (3, {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}),
        (3, {"parallel": {"fp32_modules": ["*norm"]}, "bf16": {"enabled": True}, "optimizer": {"type": "Lion"}}),
    ],
    ids=str,
)
def test_the_image_is_what_was_planned(ranks, tmp_path, stage: int, sections: dict) -> None:
    compare(ranks, 2, config_of(stage, **sections), tmp_path)


@pytest.mark.slow  # three and four ranks are started
def test_padding_and_replicas(ranks, tmp_path) -> None:
    each = 12  # bytes a parameter: fp32 and two moments
    compare(ranks, 3, config_of(3), tmp_path / "3", padding=3 * 3 * 16 * each * 5)
    compare(ranks, 4, config_of(2, parallel={"shard_size": 2}), tmp_path / "4")


def test_muon_is_planned_by_the_mean_over_ranks(ranks, tmp_path) -> None:
    config = config_of(3, optimizer={"type": "Muon"})
    found = [total - header for total, header in ranks(2).run(measure_image, config, str(tmp_path))]
    assert decoder_planner(config, "cpu").at(2).snapshot_bytes == pytest.approx(sum(found) / 2, rel=0.01)


def test_a_gpu_takes_the_same_of_its_host_and_none_of_its_own() -> None:
    """The image is one file's size wherever the state lives (tests/cuda/plan_check.py measures it on a GPU)."""
    config = config_of(3, bf16={"enabled": True})
    on_cpu, on_gpu = (decoder_planner(config, device).at(2) for device in ("cpu", "cuda"))
    assert on_cpu.snapshot_bytes == on_gpu.snapshot_bytes == on_cpu.as_json()["snapshot_bytes"] > 0
    without = decoder_planner(config_of(3, bf16={"enabled": True}, checkpoint={"async_save": False}), "cuda").at(2)
    assert without.snapshot_bytes == 0 and without.memory == on_gpu.memory
    never = decoder_planner(config_of(3, checkpoint={"every": 0, "at_end": False}), "cpu").at(2)
    assert never.snapshot_bytes == 0

"""A training whose optimizer states are on a disk: the bits of one whose states are in memory, at every turn."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from raydz.errors import ConfigError, OffloadError
from raydz.offload.nvme import NvmeTier
from tests.offload.training import RUN, assert_same, bits_of, engine_of, hosted, train
from tests.support.disks import loop_disk, needs_mounts
from tests.zero.training import Run, train_step

__all__ = ["needs_mounts"]
pytestmark = pytest.mark.native
BUDGET = 84 << 10
"""Of the model's five units, each in three or four pages, one or two stay; three slots and five gradients, too."""


def on_disk(config: dict[str, Any], path: str, budget: int = BUDGET, **section: Any) -> dict[str, Any]:
    config = hosted(config, **{"device": "nvme", "nvme_path": path, "buffer_count": 3, **section})
    config["parallel"] = config["parallel"] | {"host_memory_budget": budget}
    return config


def tier_of(engine) -> NvmeTier:
    tier = engine.optimizer._tier
    assert isinstance(tier, NvmeTier)
    return tier


def compare(rank: int, world_size: int, runs: list[Run], path: str) -> None:
    for run in runs:
        wanted = train(rank, world_size, run, hosted(run.config()))
        found = train(rank, world_size, run, on_disk(run.config(), path, world_size * BUDGET))
        assert_same(found, wanted, str(run))


def places(rank: int, world_size: int, path: str) -> tuple[int, int, int]:
    engine = engine_of(RUN, on_disk(RUN.config(), path))
    for step in (1, 2):
        train_step(engine, RUN, rank, world_size, step)
    engine.optimizer.finish()
    tier = tier_of(engine)
    found = tier.bytes_held["disk"], len(tier.residents), tier.bytes_read
    engine.destroy()
    return found


def test_states_are_on_the_disk_and_some_stay_in_memory(ranks, tmp_path):
    ((disk, num_residents, num_read),) = ranks(1).run(places, str(tmp_path))
    assert disk > 0 and num_residents > 0 and num_read > 0
    assert [path.name for path in (tmp_path / "raydz").iterdir()] == [".lock"], "a destroyed engine leaves nothing"


def test_one_rank_has_the_bits_of_the_host_in_every_precision(ranks, tmp_path):
    runs = [RUN, RUN.with_(bf16=True, stage=3), RUN.with_(fp16=True), RUN.with_(bf16=True, accumulation=2)]
    ranks(1).run(compare, runs, str(tmp_path))


def test_two_ranks_have_the_bits_of_the_host(ranks, tmp_path):
    ranks(2).run(compare, [RUN.with_(stage=2), RUN.with_(stage=3, bf16=True)], str(tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_stage_has_the_bits_of_the_host(ranks, world_size, tmp_path):
    ranks(world_size).run(compare, [RUN.with_(stage=stage, bf16=stage % 2 == 0) for stage in range(4)], str(tmp_path))


def resume(rank: int, world_size: int, path: str) -> None:
    """Through a checkpoint from memory to the disk, and from the disk to the disk and on without offload."""
    run, plain = RUN.with_(stage=3, bf16=True), RUN.with_(stage=3, bf16=True).config()
    configs = [hosted(plain), on_disk(plain, path), on_disk(plain, path), plain]
    straight = engine_of(run, plain)
    for step in range(1, len(configs) + 1):
        train_step(straight, run, rank, world_size, step)
    for step, config in enumerate(configs, start=1):
        engine = engine_of(run, config)
        if step > 1:
            engine.load_checkpoint(f"{path}/saves")
        train_step(engine, run, rank, world_size, step)
        engine.save_checkpoint(f"{path}/saves")
        found = bits_of(engine)
        engine.destroy()
    assert found == bits_of(straight)
    straight.destroy()


def test_checkpoints_pass_from_tier_to_tier(ranks, tmp_path):
    ranks(1).run(resume, str(tmp_path))


def accesses(rank: int, world_size: int, path: str) -> None:
    found = []
    for config in (hosted(RUN.config()), on_disk(RUN.config(), path, 138 << 10)):  # freezing makes a second tier
        engine = engine_of(RUN, config)
        train_step(engine, RUN, rank, world_size, 1)
        state = {name: tensor + 1 for name, tensor in engine.full_state_dict().items()}
        engine.load_full_state_dict(state)
        train_step(engine, RUN, rank, world_size, 2)
        engine.set_trainable("head*", False)
        train_step(engine, RUN, rank, world_size, 3)
        found.append(bits_of(engine))
        engine.destroy()
    assert found[0] == found[1]


def test_weights_read_changed_and_frozen_between_steps_have_the_same_bits(ranks, tmp_path):
    ranks(1).run(accesses, str(tmp_path))


def effects(rank: int, world_size: int, path: str) -> dict[str, Any]:
    """What each key makes of the tier."""
    found = {}
    cases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "plain": ({"buffer_count": 4}, {}),
        "slots": ({"buffer_count": 5}, {}),
        "read": ({"pipeline_read": False}, {}),
        "write": ({"pipeline_write": False}, {}),
        "aio": ({}, {"block_size": 8192, "queue_depth": 3, "intra_op_parallelism": 2, "single_submit": True}),
        "batches": ({}, {"overlap_events": False}),
    }
    for name, (section, aio) in cases.items():
        engine = engine_of(RUN, on_disk(RUN.config(), path, 1 << 20, **section) | {"aio": aio})
        options, hosting = tier_of(engine)._options, engine.optimizer._hosting
        found[name] = (options.slots, options.reads_ahead, options.writes_behind, options.aio, hosting.nvme_path)
        engine.destroy()
    return found


def test_every_key_reaches_the_tier(ranks, tmp_path):
    """test_nvme.py and test_aio.py show what it does there."""
    (found,) = ranks(1).run(effects, str(tmp_path))
    assert found["plain"][:3] == (4, True, True)
    assert found["plain"][4] == str(tmp_path)
    assert found["slots"][0] == 5
    assert found["read"][:3] == (3, False, True)
    assert found["write"][:3] == (3, True, False)
    aio = found["aio"][3]
    assert (aio.block_size, aio.queue_depth, aio.thread_count, aio.single_submit) == (8192, 3, 2, True)
    assert found["plain"][3].overlap_events and not found["batches"][3].overlap_events


def break_down(rank: int, world_size: int, folder: str) -> str:
    with loop_disk(Path(folder), 64 << 20, 48 << 20) as disk:
        engine = engine_of(RUN, on_disk(RUN.config(), str(disk.path)))
        train_step(engine, RUN, rank, world_size, 1)
        disk.break_down()
        try:
            for step in range(2, 5):
                train_step(engine, RUN, rank, world_size, step)
        except OffloadError as error:
            engine.destroy()
            return str(error)
    return ""


def test_a_step_on_a_broken_disk_says_which_and_why(ranks, tmp_path, needs_mounts):
    (said,) = ranks(1).run(break_down, str(tmp_path / "disk"))
    assert "errno 5 (EIO)" in said and str(tmp_path / "disk") in said


def test_a_disk_without_a_path_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"offload_optimizer.nvme_path"):
        engine_of(RUN, hosted(RUN.config(), device="nvme"))


def test_blocks_that_are_not_pages_are_refused():
    with pytest.raises(ConfigError, match=r"aio.block_size(.|\n)*4096"):
        engine_of(RUN, RUN.config() | {"aio": {"block_size": 1000}})


def slow_down(rank: int, world_size: int, folder: str) -> dict[str, float]:
    with loop_disk(Path(folder), 64 << 20, 48 << 20) as disk:
        engine = engine_of(RUN, on_disk(RUN.config(), str(disk.path)))
        train_step(engine, RUN, rank, world_size, 1)
        waits: dict[str, float] = {}
        with disk.frozen():
            threading.Timer(2.0, disk.thaw).start()
            for step in range(2, 5):
                report = train_step(engine, RUN, rank, world_size, step)[1]
                for cause, seconds in report.offload.waits_s.items():
                    waits[cause] = waits.get(cause, 0.0) + seconds
        engine.destroy()
    return waits


def test_a_step_that_waits_for_the_disk_says_so(ranks, tmp_path, needs_mounts):
    (waits,) = ranks(1).run(slow_down, str(tmp_path / "disk"))
    assert waits["disk_write"] > 0.1
    assert waits["disk_write"] > waits["update"]

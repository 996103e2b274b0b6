"""A run against the machine's memory: refused before anything is allocated, explained when it runs out later."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from raydz.config import load
from raydz.dist import World
from raydz.engine import Engine
from raydz.errors import ConfigError, TrainingError
from raydz.train import memory
from raydz.train.build import build_model
from raydz.train.memory import check_memory, measured_bytes
from raydz.units import format_bytes
from tests.train.runs import run, run_config, try_on_rank

ALONE = World(0, 1, 0, 1, torch.device("cpu"))
SHARED = World(0, 2, 0, 2, torch.device("cpu"))


def free(monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
    monkeypatch.setattr(memory, "memory_bytes", lambda: (num_bytes, num_bytes))


def test_a_run_that_cannot_fit_is_refused_before_an_engine_is_built(tmp_path, monkeypatch) -> None:
    built = []
    monkeypatch.setattr(Engine, "__init__", lambda *_, **__: built.append(1))
    free(monkeypatch, 100_000)
    with pytest.raises(ConfigError) as caught:
        run(run_config(tmp_path))
    text = str(caught.value)
    assert "does not fit; nothing was allocated" in text
    assert "moments " in text and "weights " in text and "sums " in text
    assert format_bytes(100_000) in text
    assert not built
    assert not Path(tmp_path, "runs", "a", "journal.jsonl").exists()


def test_every_rank_hears_of_the_one_that_has_too_little(ranks, tmp_path) -> None:
    kinds = ranks(2).run(refuse_on_rank_1, run_config(tmp_path))
    assert [kind for kind, _ in kinds] == ["ConfigError"] * 2
    assert all("(rank 1)" in text and "zero_optimization.stage" in text for _, text in kinds)


def refuse_on_rank_1(rank: int, world_size: int, config: dict) -> tuple[str, str]:
    real = memory.memory_bytes
    memory.memory_bytes = lambda: (1, 1) if rank == 1 else real()
    try:
        return try_on_rank(rank, world_size, config)
    finally:
        memory.memory_bytes = real


def test_host_memory_is_shared_by_the_ranks_of_the_host(tmp_path, monkeypatch) -> None:
    config = load(run_config(tmp_path))
    module = build_model(config, 300, None)
    certain = check_memory(config, module, SHARED, 300).plan.memory.certain
    free(monkeypatch, 2 * certain)
    check_memory(config, module, SHARED, 300)
    free(monkeypatch, 2 * certain - 2)
    with pytest.raises(ConfigError, match="host memory over 2 local ranks"):
        check_memory(config, module, SHARED, 300)


def test_a_gpu_is_asked_what_it_has_left(tmp_path, monkeypatch) -> None:
    config = load(run_config(tmp_path))
    module = build_model(config, 300, None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000, 10**12))
    with pytest.raises(ConfigError, match="cuda:1"):
        check_memory(config, module, World(1, 2, 1, 2, torch.device("cuda", 1)), 300)


def test_an_estimate_that_exceeds_what_is_free_warns_and_goes_on(tmp_path, monkeypatch, caplog) -> None:
    config = load(run_config(tmp_path))
    module = build_model(config, 300, None)
    certain = check_memory(config, module, ALONE, 300).plan.memory.certain
    free(monkeypatch, certain)
    with caplog.at_level("WARNING", logger="raydz"):
        check_memory(config, module, ALONE, 300)
    assert "activations" in caplog.text and "are estimates" in caplog.text


def test_a_run_that_could_not_shrink_as_far_as_it_may_is_warned_about(tmp_path, monkeypatch, caplog) -> None:
    eight = World(0, 8, 0, 8, torch.device("cpu"))
    sharded = {"zero_optimization": {"stage": 3}, "scaling": {"num_workers": [1, 8]}, "model": {"hidden_size": 256}}
    config = load(run_config(tmp_path, train_batch_size=8, **sharded))
    module = build_model(config, 300, None)
    alone = check_memory(config, module, ALONE, 300).plan.memory.certain
    free(monkeypatch, 8 * alone)
    check_memory(config, module, eight, 300)
    assert "cannot shrink" not in caplog.text
    free(monkeypatch, 8 * alone - 8)
    with caplog.at_level("WARNING", logger="raydz"):
        check_memory(config, module, eight, 300)
    assert "fewest workers of scaling.num_workers, 1," in caplog.text and "cannot shrink so far" in caplog.text


@pytest.mark.parametrize(("is_async", "is_warned"), [(True, True), (False, False)])
def test_a_host_without_room_for_a_snapshot_is_warned_about(tmp_path, monkeypatch, caplog, is_async, is_warned) -> None:
    config = load(run_config(tmp_path, checkpoint={"async_save": is_async}))
    module = build_model(config, 300, None)
    planned = check_memory(config, module, ALONE, 300).plan.memory
    assert not caplog.text
    free(monkeypatch, planned.total + planned.moments)  # of AdamW the states are half as much again
    with caplog.at_level("WARNING", logger="raydz"):
        check_memory(config, module, ALONE, 300)
    assert ("checkpoint.async_save: false" in caplog.text) == is_warned


def test_a_system_that_does_not_say_what_is_free_is_said_so(tmp_path, monkeypatch, caplog) -> None:
    def no_proc():
        raise FileNotFoundError("/proc/meminfo")

    monkeypatch.setattr(memory, "memory_bytes", no_proc)
    config = load(run_config(tmp_path))
    with caplog.at_level("WARNING", logger="raydz"):
        assert check_memory(config, build_model(config, 300, None), ALONE, 300).free_bytes is None
    assert "was not compared" in caplog.text


class Own(nn.Module):
    """A model of one's own: two blocks, one of them frozen, and a tied table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, 24)
        self.blocks = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.blocks[0].requires_grad_(False)
        self.head = nn.Linear(24, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, input_ids, **_):
        x = self.table(input_ids)
        for block in self.blocks:
            x = x + block(x).relu()
        return self.head(x)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_peoples_own_models_are_planned_from_their_parameters(ranks, tmp_path, stage: int) -> None:
    config = run_config(tmp_path, zero_optimization={"stage": stage}, train_batch_size=4)
    for planned, found in ranks(2).run(plan_and_measure, config):
        assert planned["model_states_bytes"] == sum(
            found[name] for name in ("weights", "masters", "moments", "gradients", "sums")
        )
        assert planned["activations_bytes"] == 0


def plan_and_measure(rank: int, world_size: int, config: dict) -> tuple[dict, dict]:
    import raydz.engine

    loaded = load(config)
    module = Own()
    world = World(rank, world_size, rank, world_size, torch.device("cpu"))
    planned = check_memory(loaded, module, world, 300).as_event()
    engine = raydz.engine.initialize(module, loaded.engine(), device="cpu")
    ids = torch.arange(8).view(2, 4)
    for last in (False, True):
        loss = engine(ids).logsumexp(-1).sum()
        engine.backward(loss, denominator=8.0)
        if not last:
            engine.step()
    found = measured_bytes(engine)
    engine.destroy()
    return planned, found


class ExhaustedLoss:
    """Gives up as torch or Python do, in the second step."""

    def __init__(self, error: BaseException) -> None:
        self.error, self.calls = error, 0

    def __call__(self, model, batch):
        from raydz.models import causal_lm_loss

        self.calls += 1
        if self.calls > 1:
            raise self.error
        return causal_lm_loss(model, batch)


HOST = RuntimeError("[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate memory")


@pytest.mark.parametrize(
    "error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"), MemoryError(), HOST], ids=type
)
def test_an_out_of_memory_while_training_names_bytes_by_part_and_the_key(tmp_path, error) -> None:
    with pytest.raises(TrainingError) as caught:
        run(run_config(tmp_path), loss=ExhaustedLoss(error))
    text = str(caught.value)
    assert "out of memory while training" in text
    assert "measured" in text and "moments" in text and "planned" in text
    assert caught.value.__cause__ is error
    assert caught.value.remedy
    events = [json.loads(line) for line in Path(tmp_path, "runs", "a", "events.jsonl").read_text().splitlines()]
    assert "out of memory" in next(e["error"] for e in events if e["event"] == "finish")


def test_other_errors_pass_as_they_are(tmp_path) -> None:
    with pytest.raises(RuntimeError, match="something else"):
        run(run_config(tmp_path), loss=ExhaustedLoss(RuntimeError("something else")))


def test_an_out_of_memory_while_the_engine_is_built_is_named_too(tmp_path, monkeypatch) -> None:
    def exhausted(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Engine, "__init__", exhausted)
    with pytest.raises(TrainingError, match="while the engine was built"):
        run(run_config(tmp_path))


def test_the_plan_is_recorded_when_the_run_starts(tmp_path) -> None:
    run(run_config(tmp_path, tracking={"mlflow": True}))
    events = [json.loads(line) for line in Path(tmp_path, "runs", "a", "events.jsonl").read_text().splitlines()]
    plan = next(event for event in events if event["event"] == "plan")
    parts = ("weights", "masters", "moments", "gradients", "sums")
    assert plan["model_states_bytes"] == sum(plan[f"{name}_bytes"] for name in parts) > 0
    assert plan["free_bytes"] > plan["total_bytes"]
    texts = list(Path(tmp_path).rglob("plan.txt"))
    assert texts and "model_states" not in texts[0].read_text()
    assert "moments" in texts[0].read_text()

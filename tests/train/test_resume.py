"""Interrupted and resumed equals uninterrupted, bit for bit; and `resume` never starts over in silence."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from torch import nn

from raydz.config import load
from raydz.errors import CheckpointError, ConfigError, DataError
from tests.checkpoint.states import assert_same_bits, stored_tensors
from tests.train.runs import (
    Interrupted,
    InterruptingLoss,
    column,
    command,
    environment,
    journal,
    manifests,
    run,
    run_config,
    run_on_rank,
    try_on_rank,
)


class Dropping(nn.Module):
    """A model whose forward draws random numbers."""

    def __init__(self, vocab_size: int = 300) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, 16)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(16, vocab_size)

    def forward(self, ids, position_ids=None, document_ids=None):
        return self.head(self.drop(self.embed(ids)))


def assert_equal_runs(folder, a: str, b: str) -> None:
    for key in ("loss", "lr", "grad_norm", "tokens_seen"):
        assert column(folder, key, a) == column(folder, key, b), key
    ends = [stored_tensors(folder / f"runs/{name}/checkpoints/{manifests(folder, a)[-1]}") for name in (a, b)]
    assert_same_bits(*ends)


def test_interrupted_run_goes_on_bit_for_bit(tmp_path):
    """Stopped in step 6, two steps of which the last checkpoint (4) does not know; micro-batches of 3."""
    shared = {"train": {"steps": 9}, "train_micro_batch_size_per_gpu": 3}
    run(run_config(tmp_path, run={"name": "whole"}, **shared), model=Dropping)
    with pytest.raises(Interrupted):
        run(run_config(tmp_path, **shared), model=Dropping, loss=InterruptingLoss(11))
    assert len(journal(tmp_path)) == 5 and manifests(tmp_path)[-1] == "step-0000000004"
    assert run(run_config(tmp_path, **shared), model=Dropping).status == "finished"
    assert_equal_runs(tmp_path, "a", "whole")
    assert [line["attempt"] for line in journal(tmp_path)] == [0] * 4 + [1] * 5


def test_interrupted_ranks_go_on_bit_for_bit(ranks, tmp_path):
    shared = {"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}}
    ranks(2).run(run_on_rank, run_config(tmp_path, run={"name": "whole"}, **shared))
    told = ranks(2).run(try_on_rank, run_config(tmp_path, **shared), {"loss": InterruptingLoss(4)})
    assert [kind for kind, _ in told] == ["Interrupted"] * 2
    assert len(journal(tmp_path)) == 4
    ranks(2).run(run_on_rank, run_config(tmp_path, **shared))
    assert_equal_runs(tmp_path, "a", "whole")


def test_run_goes_on_at_another_world_size_and_stage(ranks, tmp_path):
    """The same rows in the same order: losses agree up to the order of summation."""
    run(run_config(tmp_path, run={"name": "whole"}))
    ranks(2).run(try_on_rank, run_config(tmp_path, zero_optimization={"stage": 3}), {"loss": InterruptingLoss(4)})
    ranks(3).run(run_on_rank, run_config(tmp_path, zero_optimization={"stage": 1}))
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "whole"), abs=1e-5)
    assert column(tmp_path, "tokens_seen") == column(tmp_path, "tokens_seen", "whole")
    assert column(tmp_path, "lr") == column(tmp_path, "lr", "whole")


@pytest.mark.parametrize("batch", [pytest.param(6, marks=pytest.mark.slow), 7])
def test_two_then_three_then_one_rank_train_on_the_same_rows_each_once(ranks, tmp_path, batch):
    """Ranks may differ by a row where they do not divide the batch of a step."""
    shared = {"train_batch_size": batch, "checkpoint": {"every": 1}}
    whole, parts = tmp_path / "whole.rows", tmp_path / "parts.rows"
    run(run_config(tmp_path, run={"name": "whole"}, **shared), loss=RecordingLoss(whole))
    for world_size, steps, stage in ((2, 2, 3), (3, 4, 1), (1, 6, 2)):
        config = run_config(tmp_path, zero_optimization={"stage": stage}, **shared)
        hooks = {"loss": RecordingLoss(parts, stop_at=steps)}
        ranks(world_size).run(try_on_rank, config, hooks)
    assert len(journal(tmp_path)) == 6
    assert rows_of(parts) == rows_of(whole)
    assert [len(rows) for rows in rows_of(whole).values()] == [batch] * 6
    assert column(tmp_path, "loss") == pytest.approx(column(tmp_path, "loss", "whole"), abs=1e-5)


class RecordingLoss:
    """The usual loss; writes down which rows it sees, and gives up in the step after `stop_at`."""

    def __init__(self, path: Path, stop_at: int | None = None) -> None:
        self.path, self.stop_at = path, stop_at

    def __call__(self, model, batch):
        from raydz.models import causal_lm_loss

        step = model.global_steps + 1
        if self.stop_at is not None and step > self.stop_at:
            raise Interrupted
        with self.path.open("a") as file:  # ranks append to the same file, a micro-batch in one write
            file.write("".join(json.dumps([step, row]) + "\n" for row in batch["input_ids"].tolist()))
        return causal_lm_loss(model, batch)


def rows_of(path: Path) -> dict[int, list[list[int]]]:
    """The rows of every step, in order of their content."""
    rows: dict[int, list[list[int]]] = {}
    for line in path.read_text().splitlines():
        step, row = json.loads(line)
        rows.setdefault(step, []).append(row)
    return {step: sorted(found) for step, found in sorted(rows.items())}


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_killed_torchrun_goes_on_bit_for_bit(tmp_path, ranks, stage):
    """A real SIGKILL of launcher and ranks in the middle of a run whose saves are in the background."""
    shared = {
        "zero_optimization": {"stage": stage},
        "train": {"steps": 400},
        "checkpoint": {"every": 20},
        "scheduler": None,
        "optimizer": {"params": {"lr": 1e-3}},
    }
    process = subprocess.Popen(
        command(tmp_path, run_config(tmp_path, **shared), ranks=2), cwd=tmp_path, env=environment(),
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while len(journal(tmp_path)) < 30:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    kill_with_children(process)
    wait_until_quiet(tmp_path)
    done = len(journal(tmp_path))
    assert manifests(tmp_path) and done < 400
    steps = {"train": {"steps": 40 * (done // 40 + 1)}}
    ranks(2).run(run_on_rank, run_config(tmp_path, **shared | steps))
    ranks(2).run(run_on_rank, run_config(tmp_path, run={"name": "whole"}, **shared | steps))
    assert_equal_runs(tmp_path, "a", "whole")


def kill_with_children(process: subprocess.Popen) -> None:
    """torchrun puts every rank into a session of its own, so that a signal to its group would miss them."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    assert len(children) == 2
    for pid in (*map(int, children), process.pid):
        os.kill(pid, signal.SIGKILL)
    process.wait(10)


def wait_until_quiet(folder) -> None:
    """The kernel reports the launcher's end before the last rank's."""
    size = -1
    while size != (size := len(journal(folder))):
        time.sleep(0.3)


# -- the rules of `resume` --------------------------------------------------------------------------------------------


def test_never_refuses_to_leave_checkpoints_behind(tmp_path):
    run(run_config(tmp_path, train={"steps": 2}))
    with pytest.raises(ConfigError, match="left behind") as caught:
        run(run_config(tmp_path, resume="never"))
    assert caught.value.where == "resume" and "step 2" in caught.value.got
    assert "run.name" in caught.value.remedy
    assert len(journal(tmp_path)) == 2


def test_never_starts_a_run_that_has_none(tmp_path):
    assert run(run_config(tmp_path, resume="never", train={"steps": 2})).step == 2


def test_uri_starts_another_run_which_then_goes_on_from_its_own(tmp_path):
    constant = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}}
    source = run(run_config(tmp_path, train={"steps": 2}, **constant)).checkpoint_uri
    branch = run_config(tmp_path, run={"name": "branch"}, resume=source, **constant)
    with pytest.raises(Interrupted):
        run(branch, loss=InterruptingLoss(3))
    assert [line["step"] for line in journal(tmp_path, "branch")] == [3, 4, 5]
    assert manifests(tmp_path, "branch") == ["step-0000000004"]
    run(branch)  # the same job again, as a cluster restarts it
    assert [line["step"] for line in journal(tmp_path, "branch")] == [3, 4, 5, 6]
    run(run_config(tmp_path, run={"name": "whole"}, **constant))
    whole = column(tmp_path, "loss", "whole")
    assert [line["loss"] for line in journal(tmp_path, "branch")] == whole[2:]
    assert manifests(tmp_path) == ["step-0000000002"], "the source is as it was"
    assert run(branch | {"resume": "auto"}).status == "complete"


@pytest.mark.parametrize("place", ["checkpoints", "checkpoints/step-0000000002"])
def test_uri_may_name_a_run_or_one_checkpoint(tmp_path, place):
    constant = {"scheduler": None}
    run(run_config(tmp_path, train={"steps": 4}, **constant))
    branch = run_config(tmp_path, run={"name": "b"}, resume=f"{tmp_path}/runs/a/{place}", **constant)
    run(branch)
    assert journal(tmp_path, "b")[0]["step"] == (5 if place == "checkpoints" else 3)


def test_other_uri_than_the_runs_own_source_is_refused(tmp_path):
    first = run(run_config(tmp_path, train={"steps": 2})).checkpoint_uri
    run(run_config(tmp_path, run={"name": "b"}, train={"steps": 4}))
    with pytest.raises(ConfigError, match="left behind"):
        run(run_config(tmp_path, run={"name": "b"}, resume=first))


def test_own_newest_checkpoint_may_be_named(tmp_path):
    newest = run(run_config(tmp_path, train={"steps": 2}, scheduler=None)).checkpoint_uri
    run(run_config(tmp_path, train={"steps": 4}, scheduler=None, resume=newest))
    assert len(column(tmp_path, "loss")) == 4


def test_uri_without_a_checkpoint_is_an_error_and_no_new_start(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        run(run_config(tmp_path, resume=str(tmp_path / "elsewhere")))
    assert journal(tmp_path) == []


@pytest.mark.parametrize("step", [0, 3])
def test_checkpoint_of_the_engine_alone_is_refused_whatever_its_step(tmp_path, step):
    from tests.checkpoint.states import Setup, build

    engine = build(Setup())
    engine.global_steps = step
    uri = engine.save_checkpoint(tmp_path / "bare")
    engine.destroy()
    with pytest.raises(ConfigError, match="without a training run's state"):
        run(run_config(tmp_path, resume=uri))
    assert journal(tmp_path) == []


@pytest.mark.parametrize(
    ("changes", "match"),
    [({"train_batch_size": 4}, "batch_size"), ({"run": {"name": "a", "seed": 7}}, "seed"),
     ({"data": {"sequence_length": 16}}, "num_rows")],
)  # fmt: skip
def test_run_whose_data_would_go_on_otherwise_is_refused(tmp_path, changes, match):
    run(run_config(tmp_path, train={"steps": 2}))
    changes = {k: ({"root": str(tmp_path / "runs")} | v if k == "run" else v) for k, v in changes.items()}
    with pytest.raises(DataError, match=match):
        run(run_config(tmp_path, **changes))
    assert len(journal(tmp_path)) == 2


def test_damaged_newest_checkpoint_is_an_error_on_every_rank(ranks, tmp_path):
    run(run_config(tmp_path, train={"steps": 2}))
    (path,) = (tmp_path / "runs/a/checkpoints").rglob("*.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    told = ranks(2).run(try_on_rank, run_config(tmp_path))
    assert [kind for kind, _ in told] == ["CheckpointError"] * 2
    assert path.name in told[0][1]


def test_configuration_in_the_manifest_loads_back(tmp_path):
    import json

    config = run_config(tmp_path, train={"steps": 2})
    run(config)
    (path,) = (tmp_path / "runs/a/checkpoints").glob("*/manifest.json")
    stored = json.loads(path.read_text())["body"]["state"]["config"]
    assert load(stored).train == load(config).train


# -- renamed parameters -----------------------------------------------------------------------------------------------


class Deeper(nn.Module):
    """`Dropping` under other names."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Dropping()

    def forward(self, ids, position_ids=None, document_ids=None):
        return self.body(ids)


def test_key_map_is_for_the_named_checkpoint_and_not_for_the_runs_own(tmp_path):
    """`^` meets every name: a second renaming, of the run's own checkpoint, would lose all of them."""
    constant = {"scheduler": None}
    source = run(run_config(tmp_path, train={"steps": 2}, **constant), model=Dropping).checkpoint_uri
    path = tmp_path / "names.json"
    path.write_text('{"regex": {"^": "body."}}')
    branch = run_config(tmp_path, run={"name": "b"}, resume=source, resume_key_map=str(path), **constant)
    with pytest.raises(Interrupted):
        run(branch, model=Deeper, loss=InterruptingLoss(3))
    run(branch, model=Deeper)
    run(run_config(tmp_path, run={"name": "whole"}, **constant), model=Dropping)
    assert [line["loss"] for line in journal(tmp_path, "b")] == column(tmp_path, "loss", "whole")[2:]
    with pytest.raises(CheckpointError, match="lacks tensors"):
        run(branch | {"run": {"name": "c", "root": str(tmp_path / "runs")}, "resume_key_map": None}, model=Deeper)


def test_key_map_without_a_named_checkpoint_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="without the checkpoint") as caught:
        run(run_config(tmp_path, resume_key_map="names.json"))
    assert caught.value.where == "resume_key_map"


def test_key_map_of_the_command_line_and_relative_to_the_working_directory(tmp_path, monkeypatch, capsys):
    from raydz.config import resolve_paths
    from raydz.train.__main__ import main

    monkeypatch.chdir(tmp_path)
    resolved = resolve_paths(load(run_config(tmp_path, resume="x", resume_key_map="names.json")), tmp_path / "other")
    assert resolved.resume_key_map == str(tmp_path / "names.json")
    (tmp_path / "run.json").write_text(json.dumps(run_config(tmp_path)))
    assert main(["--config", "run.json", "--key-map", "names.json"]) == 1
    assert "resume_key_map" in capsys.readouterr().err

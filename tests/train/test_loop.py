"""A run from its first step to its last, in one process and over ranks."""

from __future__ import annotations

import json

import pytest

from tests.checkpoint.states import stored_tensors
from tests.train.runs import column, journal, manifests, run, run_config, run_on_rank


def test_run_learns_saves_and_writes_a_line_a_step(tmp_path):
    config = run_config(tmp_path, train={"steps": 12, "eval_every": 6}, checkpoint={"every": 5})
    result = run(config)
    losses = column(tmp_path, "loss")
    assert (result.status, result.step, len(losses)) == ("finished", 12, 12)
    assert losses[-1] < losses[0] - 0.2
    assert result.metrics["loss"] == losses[-1]
    assert manifests(tmp_path) == ["step-0000000005", "step-0000000010", "step-0000000012"]
    assert result.checkpoint_uri == f"{tmp_path}/runs/a/checkpoints/step-0000000012"
    evals = column(tmp_path, "eval_loss")
    assert [step for step, value in enumerate(evals, 1) if value] == [6, 12]
    assert result.metrics["eval_loss"] == evals[-1] < result.unigram_entropy + 1


def test_tokens_seen_are_the_valid_labels_of_all_steps(tmp_path):
    """Oracle: every row is used once an epoch, so an epoch sees each document's tokens but its first."""
    from raydz.data import PackedRows
    from raydz.data.prepare import open_prepared

    config = run_config(tmp_path, train={"steps": 1}, train_batch_size=1)
    run(config)
    (folder,) = (path.parent for path in (tmp_path / "runs/cache").glob("*/prepared.json"))
    prepared = open_prepared(folder)
    num_rows = len(PackedRows(prepared.train_dir, 32))
    config = run_config(tmp_path, train={"steps": num_rows}, train_batch_size=1, run={"name": "b"})
    run(config)
    # each document ends in eos, which is a target; its first token is not
    assert column(tmp_path, "tokens_seen", "b")[-1] == prepared.num_train_tokens - prepared.num_train_documents


def test_world_sizes_and_stages_agree_on_losses_and_weights(ranks, tmp_path):
    """One normaliser for the step: rows with different numbers of valid labels weigh by their labels."""
    losses, norms = {}, {}
    for world_size, stage, micro in [(1, 0, 6), (2, 3, 1), (3, 1, 2)]:
        name = f"w{world_size}"
        config = run_config(
            tmp_path, run={"name": name}, zero_optimization={"stage": stage}, train_micro_batch_size_per_gpu=micro
        )
        results = ranks(world_size).run(run_on_rank, config)
        assert len({result.checkpoint_uri for result in results}) == 1
        losses[name], norms[name] = column(tmp_path, "loss", name), column(tmp_path, "grad_norm", name)
    for name in ("w2", "w3"):
        assert losses[name] == pytest.approx(losses["w1"], abs=1e-5)
        assert norms[name] == pytest.approx(norms["w1"], rel=1e-4)
    finals = [stored_tensors(tmp_path / f"runs/{name}/checkpoints/step-0000000006") for name in losses]
    for key, values in finals[0].items():
        assert finals[1][key] == pytest.approx(values, abs=2e-4), key


def test_finished_run_is_complete_and_trains_no_more(tmp_path):
    config = run_config(tmp_path, train={"steps": 2})
    first = run(config)
    before = {path: path.read_bytes() for path in (tmp_path / "runs/a").rglob("*") if path.is_file()}
    again = run(config)
    assert (again.status, again.step) == ("complete", 2)
    assert again.checkpoint_uri == first.checkpoint_uri
    assert again.metrics["loss"] == first.metrics["loss"]
    assert {path: path.read_bytes() for path in (tmp_path / "runs/a").rglob("*") if path.is_file()} == before


def test_more_steps_go_on_from_where_it_stood(tmp_path):
    constant = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    run(run_config(tmp_path, train={"steps": 2}, scheduler=constant))
    assert run(run_config(tmp_path, train={"steps": 4}, scheduler=constant)).step == 4
    run(run_config(tmp_path, train={"steps": 4}, scheduler=constant, run={"name": "b"}))
    assert column(tmp_path, "loss") == column(tmp_path, "loss", "b")


@pytest.mark.parametrize(("checkpoint", "saved"), [({"every": 0}, [3]), ({"every": 2, "at_end": False}, [2])])
def test_checkpoint_habits_are_kept(tmp_path, checkpoint, saved):
    run(run_config(tmp_path, train={"steps": 3}, checkpoint=checkpoint))
    assert manifests(tmp_path) == [f"step-{step:010d}" for step in saved]


def test_manifest_says_what_resuming_needs(tmp_path):
    run(run_config(tmp_path, train={"steps": 2}))
    (path,) = (tmp_path / "runs/a/checkpoints").glob("*/manifest.json")
    state = json.loads(path.read_text())["body"]["state"]
    assert state["train"]["tokens_seen"] == journal(tmp_path)[-1]["tokens_seen"]
    assert state["data"]["next_step"] == 2 and state["data"]["batch_size"] == 6
    assert state["config"]["model"]["hidden_size"] == 32
    assert state["engine"] == {"global_steps": 2, "micro_steps": 2, "skipped_steps": 0, "skipped_in_row": 0}
    assert state["resumed_from"] is None and state["mlflow_run_id"] is None


def test_schedule_runs_over_the_runs_own_steps(tmp_path):
    warmup = {"warmup_num_steps": 2, "warmup_type": "linear"}
    run(run_config(tmp_path, scheduler={"type": "WarmupCosineLR", "params": warmup}))
    # DeepSpeed's: two steps at 0, the end of a linear rise, then a cosine whose length is train.steps
    assert column(tmp_path, "lr") == pytest.approx([0, 0, 5e-3, 8.53568e-3, 5.0005e-3, 1.46532e-3], rel=1e-4)


def test_mlflow_hears_that_a_run_killed_after_its_last_checkpoint_is_complete(tmp_path):
    from mlflow import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    config = run_config(tmp_path, train={"steps": 2}, tracking={"mlflow": True, "mlflow_uri": uri})
    run_id = run(config).mlflow_run_id
    client = MlflowClient(uri)
    client.update_run(run_id, status="RUNNING")  # what a kill between the last checkpoint and the end leaves
    assert run(config).status == "complete"
    assert client.get_run(run_id).info.status == "FINISHED"

"""Derived sizes, the identity of a run, absolute paths, the text that is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from raydz.config import load, resolve_paths, run_key
from raydz.config.text import parse_yaml

RUN = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "data": {"sources": ["a.txt"]},
    "scheduler": {"type": "WarmupCosineLR", "params": {"warmup_num_steps": 3}},
}


def test_open_sizes_are_written_out():
    config = load({"model": {"hidden_size": 200, "num_attention_heads": 10}, "data": {"sequence_length": 96}})
    model = config.model
    assert model.intermediate_size == 576  # 8/3 * 200 = 533.3, up to a multiple of 64
    assert (model.max_position_embeddings, model.num_key_value_heads, model.vocab_size) == (96, 10, 2048)


def test_vocabulary_of_a_given_tokenizer_stays_open():
    assert load({"data": {"tokenizer": {"path": "tokenizer.json"}}}).model.vocab_size == "auto"


@pytest.mark.parametrize(
    "override",
    [
        "scaling.num_workers=4",
        "scaling.gpus_per_worker=1.0",
        "train_micro_batch_size_per_gpu=2",
        "gradient_accumulation_steps=2",
        "checkpoint.every=3",
        "resume=never",
        "failure.max_failures=9",
        "tracking.mlflow=false",
        "train.log_every=7",
        "train.eval_every=7",
        "train.device=cpu",
        "run.root=/elsewhere",
        "storage.region=eu-central-1",
        "parallel.collective_timeout_s=9",
        "parallel.host_memory_budget=0.5",
        "parallel.offload_threads=3",
        "zero_optimization.offload_optimizer.device=cpu",
        "aio.queue_depth=32",
        "data.evals.dev=b.txt",
        "steps_per_print=10",
        "model.intermediate_size=704",  # what auto means
    ],
)
def test_identity_survives_restarts_resizes_and_habits(override):
    assert load(RUN, [override]).run.name == load(RUN).run.name


@pytest.mark.parametrize(
    "override",
    [
        "optimizer.params.lr=0.5",
        "train_batch_size=32",
        "train.steps=7",
        "run.seed=1",
        "model.hidden_size=128",
        "data.sources=[b.txt]",
        "data.eval_fraction=0.5",
        "zero_optimization.stage=2",
        "scheduler.params.warmup_num_steps=4",
        "gradient_clipping=0",
        "bf16.enabled=true",
    ],
)
def test_identity_changes_with_what_decides_the_result(override):
    assert load(RUN, [override]).run.name != load(RUN).run.name


def test_without_a_global_batch_the_micro_batch_is_part_of_the_identity():
    given = {"train_micro_batch_size_per_gpu": 4}
    assert load(given).run.name != load(given, ["train_micro_batch_size_per_gpu=2"]).run.name


def test_name_is_made_of_the_file_and_a_hash_or_given(write):
    name = load(write("my run.v2.yaml", "train: {steps: 3}")).run.name
    assert name.startswith("my-run.v2-") and name == load(write("my run.v2.yaml", "train: {steps: 3}")).run.name
    assert load({}).run.name.startswith("run-")
    assert load({}, ["run.name=mine"]).run.name == "mine" == run_key(load({}, ["run.name=mine"]))


def test_golden_name_so_that_a_release_finds_the_runs_of_the_last():
    # changing it makes every unnamed run start anew: do that only on purpose
    assert load(RUN).run.name == "run-d5beb095"


def test_resolved_text_reads_back_to_the_same_run(tmp_path, warned):
    config = resolve_paths(load({**RUN, "train": {"sample_prompt": "yes: 'ü' 1e3"}}), tmp_path)
    again = load(parse_yaml(config.to_yaml(), "text"))
    assert again.model_dump() == config.model_dump()
    assert "intermediate_size: 704" in config.to_yaml() and "python/" not in config.to_yaml()
    assert warned() == ""


def test_paths_become_absolute_and_name_stays(tmp_path, monkeypatch):
    monkeypatch.delenv("RAYDZ_ROOT", raising=False)
    monkeypatch.chdir(tmp_path)
    given = {**RUN, "data": {"sources": ["a.txt", "sample:wordnet", "s3://b/x"], "tokenizer": {"path": "t.json"}}}
    config = load(given)
    found = resolve_paths(config)
    root = str(tmp_path / "runs")
    assert (found.run.root, found.checkpoint.dir, found.run.name) == (root, root, config.run.name)
    assert found.tracking.mlflow_uri == f"sqlite:///{root}/mlflow.db"
    assert found.data.cache_dir == f"{root}/cache"
    assert [s.path for s in found.data.sources] == [str(tmp_path / "a.txt"), "sample:wordnet", "s3://b/x"]
    assert found.data.tokenizer.path == str(tmp_path / "t.json")
    assert resolve_paths(found, "/elsewhere").model_dump() == found.model_dump()


def test_uris_and_given_outputs_are_kept(tmp_path):
    overrides = ["checkpoint.dir=s3://b/p", "tracking.mlflow_uri=http://h:5000", "resume=old/step-3"]
    config = resolve_paths(load(RUN, overrides), tmp_path)
    assert config.checkpoint.dir == "s3://b/p" and config.tracking.mlflow_uri == "http://h:5000"
    assert config.resume == str(tmp_path / "old/step-3")
    relative = resolve_paths(load(RUN, ["tracking.mlflow_uri=sqlite:///x.db"]), tmp_path)
    assert relative.tracking.mlflow_uri == f"sqlite:///{tmp_path}/x.db"


def test_root_variable_is_read_at_the_call(tmp_path, monkeypatch):
    monkeypatch.setenv("RAYDZ_ROOT", str(tmp_path / "shared"))
    assert resolve_paths(load(RUN)).run.root == str(tmp_path / "shared" / "runs")


def test_package_of_a_ray_job_is_not_written_to(tmp_path, monkeypatch, warned):
    package = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123abcd"
    package.mkdir(parents=True)
    monkeypatch.delenv("RAYDZ_ROOT", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(package)
    config = resolve_paths(load(RUN))
    assert config.run.root == str(tmp_path / "home" / "runs")
    assert config.data.sources[0].path == "a.txt"  # the package lies elsewhere on other nodes
    assert "Ray job" in warned() and str(Path.home()) in warned()

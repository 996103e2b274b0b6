"""Exports beside training: every n-th checkpoint and the last, on disk and on S3; their failures end nothing."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from raydz.hf import BackgroundExports, ExportRequest
from raydz.hf import background as module
from raydz.storage import S3Options, open_store
from tests.hf.conversions import merged
from tests.hf.decoders import train_and_save, transformers_logits
from tests.train.runs import run, run_config, run_on_rank

EVERY = {"every": 2, "export_every": 2}


def folders(exports: Path) -> list[str]:
    return sorted(path.name for path in exports.iterdir())


def events(root: Path) -> list[dict]:
    lines = (root / "runs/a/events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"].startswith("export")]


def test_every_nth_save_and_the_last_become_folders_of_the_weights_that_were_saved(tmp_path: Path):
    config = run_config(tmp_path, checkpoint=EVERY | {"export_shard_bytes": 30_000}, train={"steps": 10})
    result = run(config)
    exports = tmp_path / "runs/a/exports"
    assert folders(exports) == ["step-0000000004", "step-0000000008", "step-0000000010"]
    for name in folders(exports):
        stored = merged(str(tmp_path / "runs/a/checkpoints" / name))
        index = json.loads((exports / name / "model.safetensors.index.json").read_text())["weight_map"]
        for tensor, file in index.items():
            assert torch.equal(load_file(exports / name / file)[tensor].reshape(-1), stored[f"weight/{tensor}"])
        assert {f"weight/{tensor}" for tensor in index} == {key for key in stored if key.startswith("weight/")}
    assert [event["event"] for event in events(tmp_path)] == ["export"] * 3
    assert result.status == "finished"


def test_an_export_loads_in_transformers_with_its_tokenizer(tmp_path: Path):
    from transformers import AutoConfig, PreTrainedTokenizerFast

    run(run_config(tmp_path, checkpoint={"every": 0, "export_every": 1}, train={"steps": 2}))
    folder = tmp_path / "runs/a/exports/step-0000000002"
    assert torch.isfinite(transformers_logits(folder, torch.tensor([[1, 2, 3]]))).all()
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    config = AutoConfig.from_pretrained(folder)
    assert tokenizer.decode([config.eos_token_id]) == "<|endoftext|>" and config.max_position_embeddings == 32


def test_without_the_key_there_is_none(tmp_path: Path):
    run(run_config(tmp_path, train={"steps": 2}))
    assert not (tmp_path / "runs/a/exports").exists()


@pytest.mark.parametrize(
    ("wanted", "found"), [("auto", torch.bfloat16), ("float32", torch.float32), ("float16", torch.float16)]
)
def test_the_dtype_is_that_of_computing_or_the_one_asked_for(wanted: str, found: torch.dtype, tmp_path: Path):
    checkpoint = {"every": 0, "export_every": 1, "export_dtype": wanted}
    run(run_config(tmp_path, checkpoint=checkpoint, bf16={"enabled": True}, train={"steps": 1}))
    weights = load_file(tmp_path / "runs/a/exports/step-0000000001/model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {found}


class Foreign(torch.nn.Module):
    """A model of people's own."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(300, 8)
        self.head = torch.nn.Linear(8, 300)

    def forward(self, input_ids):
        return self.head(self.table(input_ids))


def foreign_loss(model, batch):
    logits = model(batch["input_ids"])
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")


def test_a_model_of_peoples_own_is_exported_without_a_config(tmp_path: Path):
    config = run_config(tmp_path, checkpoint={"every": 0, "export_every": 1}, train={"steps": 1})
    run(config, model=Foreign, loss=foreign_loss)
    folder = tmp_path / "runs/a/exports/step-0000000001"
    assert set(load_file(folder / "model.safetensors")) == {"table.weight", "head.weight", "head.bias"}
    assert not (folder / "config.json").exists()


def test_a_model_of_transformers_brings_its_own_config(tmp_path: Path):
    from transformers import GPT2Config, GPT2LMHeadModel

    from raydz.config import load
    from raydz.train.exports import config_json

    own = GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=50, n_positions=16)
    found = config_json(GPT2LMHeadModel(own), load(run_config(tmp_path)), eos_id=3)
    assert found is not None
    again = GPT2Config(**json.loads(json.dumps(found)))
    assert (again.n_layer, again.n_embd, found["model_type"]) == (1, 8, "gpt2")


def test_a_failing_export_is_warned_about_counted_and_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "runs/a").mkdir(parents=True)
    (tmp_path / "runs/a/exports").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        result = run(run_config(tmp_path, checkpoint=EVERY, train={"steps": 8}))
    assert result.status == "finished" and result.step == 8
    assert [event["failures"] for event in events(tmp_path)] == [1, 2]
    assert "no export of checkpoint step-0000000008 (2 failed so far)" in caplog.text


# -- the queue ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def request_of(tmp_path: Path, ranks) -> ExportRequest:
    ranks(1).run(train_and_save, {}, 1, str(tmp_path / "c"))
    return ExportRequest(open_store(str(tmp_path / "c")), open_store(str(tmp_path / "exports")))


FOLDER = "step-0000000001"


def test_what_is_read_is_in_use_until_it_is_done(request_of: ExportRequest, monkeypatch: pytest.MonkeyPatch):
    import threading

    go, usual = threading.Event(), module.export_folder

    def slow(*args, **options):
        assert go.wait(30)
        return usual(*args, **options)

    monkeypatch.setattr(module, "export_folder", slow)
    exports = BackgroundExports(request_of)
    exports.add(FOLDER)
    assert exports.in_use() == {FOLDER} and exports.outcomes() == []
    go.set()
    exports.finish()
    assert exports.in_use() == set() and [ended.error for ended in exports.outcomes()] == [None]


def test_an_export_that_is_there_is_not_made_again_and_a_torn_one_is(request_of: ExportRequest, tmp_path: Path):
    torn = tmp_path / "exports" / FOLDER
    torn.mkdir(parents=True)
    (torn / "config.json").write_text("{}")  # of an attempt that was killed
    first = BackgroundExports(request_of)
    first.add(FOLDER)
    first.finish()
    assert len(first.outcomes()) == 1
    second = BackgroundExports(request_of)
    second.add(FOLDER)
    second.finish()
    assert second.outcomes() == [] and second.failures == 0


def test_a_run_that_fails_gives_up_and_leaves_no_index(request_of: ExportRequest, tmp_path: Path, monkeypatch):
    exports = BackgroundExports(request_of)
    monkeypatch.setattr(exports, "_go_on", lambda num_bytes: (exports._stopped.set(), usual(num_bytes)))
    usual = BackgroundExports._go_on.__get__(exports)
    exports.add(FOLDER)
    assert exports._stopped.wait(30)
    exports.stop()
    assert [ended.error for ended in exports.outcomes()] == ["given up: the run has ended"]
    assert not (tmp_path / "exports" / FOLDER / "model.safetensors").exists()


def test_a_resumed_run_makes_the_export_that_it_was_killed_in(tmp_path: Path):
    config = run_config(tmp_path, checkpoint={"every": 2, "export_every": 1}, train={"steps": 4})
    run(config | {"train": config["train"] | {"steps": 2}})
    (tmp_path / f"runs/a/exports/{FOLDER[:-1]}2/model.safetensors").unlink()
    run(config)
    found = tmp_path / "runs/a/exports"
    assert folders(found) == ["step-0000000002", "step-0000000004"]
    assert all((found / name / "model.safetensors").exists() for name in folders(found))


@pytest.mark.s3
def test_a_run_of_two_ranks_exports_to_s3(tmp_path: Path, s3_env, ranks):
    uri = f"s3://{s3_env.bucket()}/team"
    config = run_config(
        tmp_path, checkpoint={**EVERY, "dir": uri, "export_shard_bytes": 30_000}, train={"steps": 4},
        storage={"endpoint_url": s3_env.endpoint_url}, zero_optimization={"stage": 3},
    )  # fmt: skip
    ranks(2).run(run_with_environment, s3_env.env, config)
    store = open_store(f"{uri}/a/exports", S3Options(endpoint_url=s3_env.endpoint_url))
    keys = store.list()
    assert store.list_folders() == ["step-0000000004"] and f"{FOLDER[:-1]}4/model.safetensors.index.json" in keys
    local = tmp_path / "copy"
    local.mkdir()
    for key in keys:
        (local / key.rpartition("/")[2]).write_bytes(store.get(key))
    assert torch.isfinite(transformers_logits(local, torch.tensor([[1, 2, 3]]))).all()


def run_with_environment(rank: int, world_size: int, env: dict[str, str], config: dict) -> str:
    """Ranks are processes of the session; the server's credentials reach them here."""
    os.environ.update(env)
    try:
        return run_on_rank(rank, world_size, config).status
    finally:
        for name in env:
            del os.environ[name]

"""`model.init_from`: training that begins with the weights of a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from raydz.errors import CheckpointError
from tests.hf.conversions import merged, same_bits
from tests.hf.decoders import SHAPE, decoder, engine_of, tokens
from tests.hf.test_export import source_of
from tests.train.runs import run, run_config


def llama(tied: bool = False, **changes: Any):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    sizes = {**SHAPE, "tie_word_embeddings": tied, "rope_parameters": rope, **changes}
    return LlamaForCausalLM(LlamaConfig(**sizes, initializer_range=0.2)).eval()


def logits_after_init(rank: int, world_size: int, folder: str, stage: int, tied: bool) -> list:
    """Of an engine that was made with other values."""
    from raydz.hf import load_initial
    from raydz.storage import S3Options

    engine = engine_of(decoder(tie_word_embeddings=tied), stage)
    load_initial(engine, folder, S3Options())
    engine.eval()
    with torch.no_grad():
        found = engine(tokens())
    assert engine.global_steps == 0
    engine.destroy()
    return found.tolist()


@pytest.mark.parametrize(
    ("stage", "world_size", "tied"),
    [(0, 1, False), pytest.param(3, 2, True), pytest.param(1, 3, False, marks=pytest.mark.slow)],
)
@torch.no_grad()
def test_the_engine_computes_what_transformers_computes(stage, world_size, tied, tmp_path: Path, ranks):
    theirs = llama(tied)
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    wanted: Tensor = theirs(tokens()).logits
    for found in ranks(world_size).run(logits_after_init, str(tmp_path), stage, tied):
        torch.testing.assert_close(torch.tensor(found), wanted, rtol=1e-5, atol=1e-5)


def test_a_folder_that_does_not_fit_changes_nothing(tmp_path: Path):
    from raydz.hf import export_folder, load_initial
    from raydz.storage import S3Options, open_store

    engine = engine_of(decoder(), 2)
    before = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    llama(hidden_size=12, num_attention_heads=3, num_key_value_heads=1).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"another shape[\s\S]*config.json"):
        load_initial(engine, str(tmp_path / "other"), S3Options())
    half = {name: tensor for name, tensor in before.items() if "layers.1" not in name}
    export_folder(source_of(half), open_store(str(tmp_path / "half")))
    with pytest.raises(CheckpointError, match=r"lacks tensors[\s\S]*layers.1"):
        load_initial(engine, str(tmp_path / "half"), S3Options())
    with pytest.raises(CheckpointError, match=r"no weights to begin with[\s\S]*raydz convert"):
        load_initial(engine, str(tmp_path / "nothing"), S3Options())
    assert all(torch.equal(before[name], p) for name, p in engine.module.named_parameters())
    engine.destroy()


@pytest.mark.parametrize("of", ["exports/step-0000000003", "checkpoints"])
def test_a_run_begins_with_the_weights_of_another_runs_end(of: str, tmp_path: Path):
    """Trained on at a rate of zero: what it saves is what the other one saved, bit by bit."""
    own: dict[str, Any] = {"checkpoint": {"every": 0, "export_every": 1}, "scheduler": None}
    run(run_config(tmp_path, **own, train={"steps": 3}))
    still = {"type": "SGD", "params": {"lr": 0.0}}
    second = {"run": {"name": "b", "seed": 5}, "optimizer": still, "train": {"steps": 1}}
    run(run_config(tmp_path, **own, **second, model={"init_from": str(tmp_path / "runs/a" / of)}))
    first, begun = (merged(str(tmp_path / "runs" / name / "checkpoints")) for name in "ab")
    assert same_bits(begun, {name: tensor for name, tensor in first.items() if name.startswith("weight/")}) == []


def test_a_resumed_run_does_not_begin_again(tmp_path: Path):
    own = {"checkpoint": {"every": 1, "export_every": 1}}
    run(run_config(tmp_path, **own, train={"steps": 1}))
    folder = tmp_path / "runs/a/exports/step-0000000001"
    second = run_config(tmp_path, **own, run={"name": "b"}, model={"init_from": str(folder)}, train={"steps": 1})
    run(second)
    for path in folder.iterdir():
        path.unlink()  # nobody needs it any more
    second["train"] = second["train"] | {"steps": 2}
    assert run(second).step == 2

"""raydz checkpoints as sources: merged from the files of all ranks, verified, a batch at a time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from raydz.errors import CheckpointError
from raydz.hf import checkpoint_source, open_source
from tests.hf.conversions import merged
from tests.hf.decoders import train_and_save


@pytest.fixture
def saved(tmp_path: Path, ranks) -> Path:
    ranks(2).run(train_and_save, {}, 3, str(tmp_path / "c"))
    return tmp_path / "c"


def test_weights_of_sharded_files_are_merged_in_batches(saved: Path, monkeypatch: pytest.MonkeyPatch):
    wanted = merged(str(saved))
    monkeypatch.setattr(checkpoint_source, "BATCH_BYTES", 5000)
    source = open_source(str(saved))
    names = [item.name for item in source.tensors]
    assert {f"weight/{name}" for name in names} == {name for name in wanted if name.startswith("weight/")}
    assert names.index("model.layers.0.mlp.up_proj.weight") < names.index("model.layers.1.mlp.up_proj.weight")
    for order in (source.tensors, source.tensors[::-1]):  # out of order is slower, not wrong
        for item in order:
            assert torch.equal(item.read().reshape(-1), wanted[f"weight/{item.name}"]), item.name


def test_layers_are_in_the_order_of_their_numbers():
    names = ["l.10.w", "l.9.w", "l.9.b", "a"]
    assert sorted(names, key=checkpoint_source._by_number) == ["a", "l.9.b", "l.9.w", "l.10.w"]


def test_a_damaged_shard_is_an_error_not_an_export(saved: Path):
    data = max(saved.rglob("rank-00001-*.safetensors"))
    content = bytearray(data.read_bytes())
    content[-100] ^= 1  # in the last tensor of that rank
    content[5000] ^= 1
    data.write_bytes(content)
    source = open_source(str(saved))
    with pytest.raises(CheckpointError, match="checksum does not fit"):
        for item in source.tensors:
            item.read()


def test_a_kind_that_is_not_there_is_named(saved: Path):
    with pytest.raises(CheckpointError, match=r"nothing of that kind[\s\S]*ema"):
        open_source(str(saved), kind="ema")
    moments = merged(str(saved))
    source = open_source(str(saved), kind="exp_avg")  # any kind can stand for the weights
    assert all(torch.equal(item.read().reshape(-1), moments[f"exp_avg/{item.name}"]) for item in source.tensors)

"""raydz's decoder as Hugging Face's Llama and back: the same logits, whoever computes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf import config_of_decoder, derive_config, export_folder, open_source, write_checkpoint
from raydz.hf.llama import model_section
from raydz.models import DecoderShape
from raydz.storage import open_store
from tests.hf.decoders import SHAPE, decoder, engine_of, tokens, train_and_save, transformers_logits


def export(uri: str, folder: Path, tied: bool = False, **options: Any) -> None:
    config = config_of_decoder(DecoderShape(**SHAPE, tie_word_embeddings=tied), 64)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500.0  # transformers 4 and 5
    export_folder(open_source(uri), open_store(str(folder)), config_json=config, **options)


@pytest.mark.parametrize(
    ("tied", "stage", "world_size"), [(False, 3, 2), pytest.param(True, 1, 1), pytest.param(True, 3, 2)]
)
def test_an_export_has_the_engines_logits_in_transformers(tied: bool, stage: int, world_size: int, tmp_path, ranks):
    uri, folder = str(tmp_path / "c"), tmp_path / "hf"
    logits = ranks(world_size).run(train_and_save, {"tie_word_embeddings": tied}, stage, uri)[0]
    export(uri, folder, tied, shard_bytes=6000)
    torch.testing.assert_close(transformers_logits(folder, tokens()), torch.tensor(logits), rtol=1e-5, atol=1e-5)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    stored = {name for file in set(index["weight_map"].values()) for name in load_file(folder / file)}
    assert stored == set(index["weight_map"]) and len(set(index["weight_map"].values())) > 2
    assert ("lm_head.weight" in stored) is not tied


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_folder_of_transformers_has_the_same_logits_here(tied: bool, dtype: torch.dtype, tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    rope = {"rope_type": "default", "rope_theta": 500.0}
    config = LlamaConfig(
        **{**SHAPE, "tie_word_embeddings": tied, "rope_parameters": rope}, initializer_range=0.2, use_cache=False
    )
    theirs = LlamaForCausalLM(config).to(dtype).eval()
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    source = open_source(str(tmp_path / "hf"))
    section = dict(source.model)
    assert section.pop("max_position_embeddings") == 2048
    write_checkpoint(source, open_store(str(tmp_path / "c")))
    engine = engine_of(decoder(**section), 0)
    engine.load_checkpoint(str(tmp_path / "c"), weights_only=True)
    engine.eval()
    with torch.no_grad():
        again = LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()  # its rotary table anew
        wanted: Tensor = again(tokens()).logits
        torch.testing.assert_close(engine(tokens()), wanted, rtol=1e-5, atol=1e-5)
    engine.destroy()


def test_a_sharded_folder_goes_through_raydz_and_comes_back_bit_by_bit(tmp_path: Path):
    from transformers import LlamaConfig, LlamaForCausalLM

    theirs = LlamaForCausalLM(LlamaConfig(**SHAPE)).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path / "hf", max_shard_size="8KB")
    write_checkpoint(open_source(str(tmp_path / "hf")), open_store(str(tmp_path / "c")))
    export(str(tmp_path / "c"), tmp_path / "again")
    found = load_file(tmp_path / "again/model.safetensors")
    wanted = {name: tensor for name, tensor in theirs.state_dict().items()}
    assert set(found) == set(wanted)
    assert all(torch.equal(found[name], wanted[name]) and found[name].dtype == torch.bfloat16 for name in wanted)
    assert json.loads((tmp_path / "again/config.json").read_text())["dtype"] == "bfloat16"


def test_heads_must_be_known_and_fit(tmp_path: Path):
    engine = engine_of(decoder(), 0)
    engine.save_checkpoint(tmp_path)
    engine.destroy()
    source = open_source(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"heads is not known[\s\S]*--heads"):
        derive_config(source)
    with pytest.raises(CheckpointError, match="does not fit"):
        derive_config(source, heads=5)
    config = derive_config(source, heads=6)
    assert config is not None
    assert {name: config[name] for name in SHAPE if name not in ("rope_theta", "rms_norm_eps")} == {
        name: value for name, value in SHAPE.items() if name not in ("rope_theta", "rms_norm_eps")
    }
    assert "rope_theta 10000" in source.notes[-1]


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SHAPE}


@pytest.mark.parametrize(
    ("changes", "lacking"),
    [
        ({}, None),
        ({"head_dim": 4, "hidden_act": "silu", "attention_bias": False, "rope_scaling": None}, None),
        ({"architectures": ["Qwen2ForCausalLM"]}, "Qwen2"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"attention_bias": True}, "biases"),
        ({"head_dim": 8}, "width 8"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "llama3"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "linear"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "yarn"),
    ],
)
def test_what_the_decoder_cannot_run_is_said(changes: dict[str, Any], lacking: str | None):
    section, found = model_section({**LLAMA, **changes})
    if lacking is None:
        assert found == [] and section == {**SHAPE, "rope_theta": 500.0}
    else:
        assert section == {} and lacking in found[0]

"""`raydz convert` as a person calls it: every source to every form, what it prints, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.hf.conversions import RECORDED, expected, merged, same_bits
from tests.hf.decoders import SHAPE, decoder, engine_of, tokens, transformers_logits


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    """A checkpoint of a decoder after one step, as a person's own script saves it."""
    folder = tmp_path_factory.mktemp("saved")
    engine = engine_of(decoder(rope_theta=10000.0, rms_norm_eps=1e-5), 2)
    engine.backward(engine(tokens(), labels=tokens()) / tokens().numel())
    engine.step()
    engine.save_checkpoint(folder)
    engine.destroy()
    return folder


def fine(result) -> str:
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def test_deepspeed_to_raydz(tmp_path: Path, raydz_command):
    out = fine(raydz_command("convert", RECORDED / "stage3", tmp_path / "c", "--to", "raydz"))
    assert "a DeepSpeed checkpoint, ZeRO stage 3, 2 ranks, step 3: 26 tensors" in out
    assert out.strip().endswith(f"{tmp_path}/c/step-0000000003")
    wanted = {name: tensor.reshape(-1) for name, tensor in expected("stage3")[0].items()}
    assert same_bits(merged(str(tmp_path / "c")), wanted) == []


def test_deepspeed_to_a_hugging_face_folder_of_another_model(tmp_path: Path, raydz_command):
    result = raydz_command(
        "convert", RECORDED / "stage2", tmp_path / "hf", "--to", "hf", "--dtype", "bfloat16", "--json"
    )
    found = json.loads(fine(result))
    assert found["files"] == {"model.safetensors": (tmp_path / "hf/model.safetensors").stat().st_size}
    assert found["notes"] == ["no config.json: the model is not raydz's decoder, give one with --config"]
    weights = load_file(tmp_path / "hf/model.safetensors")
    wanted = {key.partition("/")[2] for key in expected("stage2")[0] if key.startswith(("weight/", "buffer/"))}
    assert set(weights) == wanted and {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_raydz_to_hugging_face_in_shards_and_back(saved: Path, tmp_path: Path, raydz_command):
    hf, again = tmp_path / "hf", tmp_path / "again"
    out = fine(raydz_command("convert", saved, hf, "--to", "hf", "--heads", "6", "--shard-size", "8KiB"))
    assert "note: no configuration: rope_theta 10000" in out and "safetensors files" in out
    assert len(list(hf.glob("model-*-of-*.safetensors"))) > 2
    logits = transformers_logits(hf, tokens())
    out = fine(raydz_command("convert", hf, again, "--to", "raydz"))
    assert "  hidden_size: 24" in out and "  num_key_value_heads: 2" in out
    engine = engine_of(decoder(rope_theta=10000.0, rms_norm_eps=1e-5), 0)
    engine.load_checkpoint(again, weights_only=True)
    engine.eval()
    with torch.no_grad():
        torch.testing.assert_close(engine(tokens()), logits, rtol=1e-5, atol=1e-5)
    engine.destroy()


def test_a_given_config_is_written_with_the_dtype(saved: Path, tmp_path: Path, raydz_command):
    own = tmp_path / "config.json"
    own.write_text(json.dumps({"architectures": ["Mine"], "torch_dtype": "float64"}))
    fine(raydz_command("convert", saved, tmp_path / "hf", "--to", "hf", "--config", own, "--dtype", "float16"))
    written = json.loads((tmp_path / "hf/config.json").read_text())
    assert written == {"architectures": ["Mine"], "dtype": "float16", "torch_dtype": "float16"}


def test_raydz_to_a_single_file(saved: Path, tmp_path: Path, raydz_command):
    fine(raydz_command("convert", saved, tmp_path / "one.safetensors", "--to", "single"))
    stored = merged(str(saved))
    found = load_file(tmp_path / "one.safetensors")
    wanted = {name.partition("/")[2]: tensor for name, tensor in stored.items() if name.startswith("weight/")}
    assert {name: tensor.reshape(-1).tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in wanted.items()
    }


def test_a_single_file_and_weights_alone_to_raydz(saved: Path, tmp_path: Path, raydz_command):
    fine(raydz_command("convert", saved, tmp_path / "one.safetensors", "--to", "single"))
    fine(raydz_command("convert", tmp_path / "one.safetensors", tmp_path / "c", "--to", "raydz"))
    wanted = {name: tensor for name, tensor in merged(str(saved)).items() if name.startswith("weight/")}
    assert same_bits(merged(str(tmp_path / "c")), wanted) == []
    options = ("--to", "raydz", "--weights-only", "--json")
    found = json.loads(fine(raydz_command("convert", RECORDED / "universal", tmp_path / "w", *options)))
    assert found["kinds"] == {"buffer": 1, "weight": 9}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--to", "pickle"), "hf, raydz, single"),
        (("--to", "hf", "--dtype", "int8"), "keep, float32"),
        (("--to", "raydz", "--dtype", "bfloat16"), "keeps masters"),
        (("--to", "raydz"), "a raydz checkpoint already"),
        (("--to", "hf"), "heads is not known"),
        (("--to", "hf", "--shard-size", "big"), "not a size"),
        (("--to", "single"), "not the name of a file"),
        (("--to", "hf", "--kind", "ema"), "nothing of that kind"),
    ],
)
def test_what_makes_no_sense_is_a_message_and_exit_code_1(saved: Path, tmp_path: Path, raydz_command, options, message):
    result = raydz_command("convert", saved, tmp_path / "out", *options)
    assert result.exit_code == 1 and message in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_place_with_nothing_is_said(tmp_path: Path, raydz_command):
    result = raydz_command("convert", tmp_path, tmp_path / "out", "--to", "hf")
    assert result.exit_code == 1 and "no checkpoint that raydz knows" in result.stderr


@pytest.mark.s3
def test_from_and_to_s3(saved: Path, tmp_path: Path, raydz_command, s3_env):
    uri, endpoint = f"s3://{s3_env.bucket()}/models", ("--endpoint-url", s3_env.endpoint_url)
    fine(raydz_command("convert", saved, f"{uri}/hf", "--to", "hf", "--heads", "6", *endpoint))
    fine(raydz_command("convert", f"{uri}/hf", f"{uri}/c", "--to", "raydz", *endpoint))
    fine(raydz_command("convert", f"{uri}/c", tmp_path / "one.safetensors", "--to", "single", *endpoint))
    wanted = {name: tensor for name, tensor in merged(str(saved)).items() if name.startswith("weight/")}
    found = {f"weight/{name}": tensor.reshape(-1) for name, tensor in load_file(tmp_path / "one.safetensors").items()}
    assert same_bits(found, wanted) == [] and SHAPE["vocab_size"] == 53
    result = raydz_command("convert", f"{uri}/nothing", tmp_path / "x", "--to", "hf", *endpoint)
    assert result.exit_code == 1 and "no checkpoint that raydz knows" in result.stderr

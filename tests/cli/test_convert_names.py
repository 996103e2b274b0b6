"""`raydz convert` with a key map, and from S3 what torch wrote: renamed names, the same bits, nothing left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from raydz.storage import S3Options, open_store
from tests.hf.conversions import RECORDED, expected, merged, same_bits


def fine(result) -> str:
    assert result.exit_code == 0, result.output + str(result.exception)
    return result.stdout


def write_map(folder: Path, rules: dict) -> Path:
    path = folder / "map.json"
    path.write_text(json.dumps(rules))
    return path


def first_names(case: str) -> list[str]:
    return sorted({key.partition("/")[2] for key in expected(case)[0]})


def rules_for(case: str) -> tuple[dict, dict[str, str]]:
    """An exact rule for one name, an expression for all that end in `weight`; and {stored: new} by hand."""
    names = first_names(case)
    exact = next(name for name in names if name.endswith("bias"))
    new = {name: name.replace("weight", "w") for name in names} | {exact: "renamed.b"}
    rules = {"exact": {exact: "renamed.b", "no.such.name": "x"}, "regex": {"weight$": "w", "^never": "y"}}
    return rules, new


@pytest.mark.parametrize("case", ["stage1", "stage3", "universal"])
def test_a_key_map_renames_all_kinds_and_says_what_matched(case: str, tmp_path: Path, raydz_command):
    rules, new = rules_for(case)
    options = ("--to", "raydz", "--key-map", write_map(tmp_path, rules))
    found = json.loads(fine(raydz_command("convert", RECORDED / case, tmp_path / "c", *options, "--json")))
    assert found["unused_rules"] == ["no.such.name", "^never"]
    stored = {name for name in new if f"weight/{name}" in expected(case)[0] or f"buffer/{name}" in expected(case)[0]}
    assert found["renamed"].items() >= {new[name]: name for name in stored if new[name] != name}.items()
    wanted = {}
    for key, tensor in expected(case)[0].items():
        kind, _, name = key.partition("/")
        wanted[f"{kind}/{new[name]}"] = tensor.reshape(-1)
    assert same_bits(merged(str(tmp_path / "c")), wanted) == []


def test_the_report_for_people_names_changes_and_idle_rules(tmp_path: Path, raydz_command):
    rules, new = rules_for("stage1")
    options = ("--to", "single", "--key-map", write_map(tmp_path, rules))
    out = fine(raydz_command("convert", RECORDED / "stage1", tmp_path / "one.safetensors", *options))
    assert "names changed by the key map" in out and " -> renamed.b\n" in out
    assert "note: a rule of the key map matched nothing: ^never" in out
    weights = load_file(tmp_path / "one.safetensors")
    assert "renamed.b" in weights and set(weights) <= set(new.values())


@pytest.mark.parametrize(
    ("rules", "message"),
    [({"regex": {"^.*$": "one"}}, "makes two stored tensors one"), ({"regex": {"(": "x"}}, "not a regular expression")],
)
def test_a_map_that_cannot_be_meant_is_refused(rules: dict, message: str, tmp_path: Path, raydz_command):
    options = ("--to", "raydz", "--key-map", write_map(tmp_path, rules))
    result = raydz_command("convert", RECORDED / "stage1", tmp_path / "c", *options)
    assert result.exit_code == 1 and message in result.stderr and not (tmp_path / "c").exists()


def upload(folder: Path, uri: str, options: S3Options) -> None:
    """Every file below the folder."""
    store = open_store(uri, options)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            store.put(str(path.relative_to(folder)), path.read_bytes())


@pytest.mark.s3
@pytest.mark.parametrize("case", ["stage3", pytest.param("universal", marks=pytest.mark.slow)])
def test_deepspeeds_folder_on_s3_converts_as_the_local_one(case: str, tmp_path: Path, raydz_command, s3_env):
    uri, endpoint = f"s3://{s3_env.bucket()}/ds", ("--endpoint-url", s3_env.endpoint_url)
    upload(RECORDED / case, uri, S3Options(endpoint_url=s3_env.endpoint_url))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    options = ("--to", "raydz", "--scratch", scratch, *endpoint)
    out = fine(raydz_command("convert", uri, tmp_path / "c", *options))
    wanted = {name: tensor.reshape(-1) for name, tensor in expected(case)[0].items()}
    assert same_bits(merged(str(tmp_path / "c")), wanted) == [] and "step 3" in out
    assert list(scratch.iterdir()) == [], "the copy is gone"


@pytest.mark.s3
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch's, of saving without a process group
def test_dcp_on_s3_converts(tmp_path: Path, raydz_command, s3_env):
    import torch
    import torch.distributed.checkpoint as dcp

    weights = {"a.weight": torch.arange(12.0).view(3, 4), "b": torch.ones(5, dtype=torch.bfloat16)}
    dcp.save({"model": weights}, checkpoint_id=str(tmp_path / "dcp"), no_dist=True)
    uri = f"s3://{s3_env.bucket()}/dcp"
    upload(tmp_path / "dcp", uri, S3Options(endpoint_url=s3_env.endpoint_url))
    options = ("--to", "single", "--model-key", "model", "--endpoint-url", s3_env.endpoint_url)
    fine(raydz_command("convert", uri, tmp_path / "one.safetensors", *options))
    found = load_file(tmp_path / "one.safetensors")
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.s3
def test_a_place_too_small_for_the_copy_is_said_before_anything_is_read(
    tmp_path: Path, raydz_command, s3_env, monkeypatch
):
    uri, endpoint = f"s3://{s3_env.bucket()}/ds", ("--endpoint-url", s3_env.endpoint_url)
    upload(RECORDED / "stage1", uri, S3Options(endpoint_url=s3_env.endpoint_url))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage._replace(free=1000))
    result = raydz_command("convert", uri, tmp_path / "c", "--to", "raydz", "--scratch", tmp_path, *endpoint)
    assert result.exit_code == 1 and "no room for the copy" in result.stderr and "--scratch" in result.stderr
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_env.env["AWS_ACCESS_KEY_ID"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_env.env["AWS_SECRET_ACCESS_KEY"])
    result = raydz_command("convert", uri, tmp_path / "c", "--to", "raydz", "--scratch", tmp_path / "none", *endpoint)
    assert result.exit_code == 1 and "no place for the copy" in result.stderr

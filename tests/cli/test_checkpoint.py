"""`raydz checkpoint` on checkpoints that a real engine saved."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import raydz.engine

BATCH = {"train_batch_size": 2, "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}}}


class Tied(nn.Module):
    """3 names for 2 parameters: a (5, 3), b (5,), and another name for a."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.again = nn.Linear(3, 5, bias=False)
        self.again.weight = self.first.weight

    def forward(self, rows):
        return (self.first(rows) + self.again(rows)).sum()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run's folder with checkpoints of step 1 and step 2, and the folder of a save that was interrupted."""
    root = tmp_path_factory.mktemp("runs")
    folder = root / "tiny" / "checkpoints"
    engine = raydz.engine.initialize(Tied(), BATCH, device="cpu")
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        engine.save_checkpoint(folder, client_state={"note": 1})
    engine.destroy()
    torn = folder / "step-0000000003" / "attempt"
    torn.mkdir(parents=True)
    (torn / "rank-00000-of-00001.safetensors").write_bytes(b"half")
    return root


@pytest.mark.parametrize("below", ["", "tiny", "tiny/checkpoints"])
def test_ls_finds_checkpoints_from_the_root_the_run_and_their_own_folder(run, raydz_command, below):
    result = raydz_command("checkpoint", "ls", run / below, "--json")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    prefix = "tiny/checkpoints/".removeprefix(below).lstrip("/")
    assert [item["folder"] for item in found["committed"]] == [f"{prefix}step-000000000{step}" for step in (1, 2)]
    assert [item["step"] for item in found["committed"]] == [1, 2]
    assert found["uncommitted"] == [f"{prefix}step-0000000003"]


def test_ls_counts_what_lies_on_the_disk(run, raydz_command):
    folder = run / "tiny" / "checkpoints"
    found = json.loads(raydz_command("checkpoint", "ls", folder, "--json").stdout)["committed"][0]
    assert found["bytes"] == sum(f.stat().st_size for f in (folder / "step-0000000001").rglob("*.safetensors"))
    assert found["world_size"] == 1
    assert found["tensors"] == 6  # weight and AdamW's two moments, of each of 2 parameters
    assert found["fault"] is None


def test_ls_prints_a_line_each_and_names_what_is_not_committed(run, raydz_command):
    lines = raydz_command("checkpoint", "ls", run).stdout.splitlines()
    assert lines[0].startswith("tiny/checkpoints/step-0000000001")
    assert lines[1].startswith("tiny/checkpoints/step-0000000002")
    assert "not committed" in lines[2]
    assert "step-0000000003" in lines[2]
    assert lines[3].startswith("2 committed under ")


def test_ls_shows_a_damaged_manifest_beside_the_good_ones(run, raydz_command, tmp_path):
    for step in (1, 2):
        folder = tmp_path / f"step-000000000{step}"
        folder.mkdir()
        manifest = (run / "tiny" / "checkpoints" / folder.name / "manifest.json").read_bytes()
        flipped = manifest.replace(b'"step":1', b'"step":7')
        assert (flipped != manifest) is (step == 1)
        (folder / "manifest.json").write_bytes(flipped)
    lines = raydz_command("checkpoint", "ls", tmp_path).stdout.splitlines()
    assert "its checksum does not fit" in lines[0]
    assert "step        2" in lines[1]


@pytest.mark.parametrize(("below", "step"), [("step-0000000001", 1), ("", 2)])
def test_show_describes_the_named_checkpoint_or_the_newest(run, raydz_command, below, step):
    folder = run / "tiny" / "checkpoints"
    found = json.loads(raydz_command("checkpoint", "show", folder / below, "--json").stdout)
    assert found["step"] == step
    assert found["uri"] == str(folder / f"step-000000000{step}")
    assert found["kinds"]["weight F32"] == {"tensors": 2, "elements": 20}  # 5 * 3 and 5
    assert found["tied"] == {"again.weight": "first.weight"}
    assert found["state"] == ["client", "engine"]
    assert list(found["files"].values()) == [found["bytes"]]


def test_show_prints_the_same_for_a_person(run, raydz_command):
    said = raydz_command("checkpoint", "show", run / "tiny" / "checkpoints" / "step-0000000001").stdout
    assert "2 tensors, 20 elements" in said
    assert "again.weight = first.weight" in said
    assert "on 1 ranks" in said


def test_a_folder_without_checkpoints_is_an_error_that_says_where_to_look(raydz_command, tmp_path):
    result = raydz_command("checkpoint", "ls", tmp_path)
    assert result.exit_code == 1
    assert "no checkpoint here" in result.stderr
    assert "checkpoint.dir" in result.stderr


@pytest.mark.s3
def test_ls_reads_a_bucket(s3_env, raydz_command):
    uri = f"s3://{s3_env.bucket()}/runs"
    from raydz.storage import S3Options

    engine = raydz.engine.initialize(Tied(), BATCH, device="cpu")
    engine.save_checkpoint(f"{uri}/tiny/checkpoints", options=S3Options(endpoint_url=s3_env.endpoint_url))
    engine.destroy()
    result = raydz_command("checkpoint", "ls", uri, "--endpoint-url", s3_env.endpoint_url)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("tiny/checkpoints/step-0000000000")

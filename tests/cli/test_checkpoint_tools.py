"""`raydz checkpoint verify | diff | gc | cp` on checkpoints that a real engine saved."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
import torch

import raydz.engine
from raydz.cli.checkpoint_tools import rules_of
from raydz.cli.progress import bytes_bar
from raydz.errors import ConfigError
from raydz.units import parse_seconds
from tests.cli.test_checkpoint import BATCH, Tied

STEPS = ("step-0000000001", "step-0000000002", "step-0000000003")


@pytest.fixture(scope="module")
def pristine(tmp_path_factory) -> Path:
    """A folder of runs: `tiny` with three checkpoints."""
    root = tmp_path_factory.mktemp("runs")
    engine = raydz.engine.initialize(Tied(), BATCH, device="cpu")
    for _ in STEPS:
        engine.backward(engine(torch.ones(2, 3)))
        engine.step()
        engine.save_checkpoint(root / "tiny/checkpoints")
    engine.destroy()
    return root


@pytest.fixture
def run(pristine, tmp_path) -> Path:
    """A copy of the folder of checkpoints, in a folder of runs."""
    return Path(shutil.copytree(pristine, tmp_path / "runs")) / "tiny/checkpoints"


def data_file(run: Path, step: str) -> Path:
    (found,) = (run / step).rglob("*.safetensors")
    return found


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def num_bytes(*folders: Path) -> int:
    return sum(path.stat().st_size for folder in folders for path in folder.rglob("*.safetensors"))


# -- verify ------------------------------------------------------------------------------------------------------------


def test_verify_takes_the_newest_or_all_and_says_so(run, raydz_command):
    result = raydz_command("checkpoint", "verify", run)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"whole     {run / STEPS[2]}: every checksum fits (1 files, ")
    everything = json.loads(raydz_command("checkpoint", "verify", run, "--all", "--json").stdout)["checkpoints"]
    assert [item["uri"] for item in everything] == [str(run / step) for step in STEPS]
    assert all(item["damage"] == [] and item["bytes"] == num_bytes(Path(item["uri"])) for item in everything)


def test_verify_names_damage_and_exits_1(run, raydz_command):
    path = data_file(run, STEPS[1])
    flip(path)
    name = path.relative_to(run / STEPS[1]).as_posix()
    assert raydz_command("checkpoint", "verify", run).exit_code == 0
    assert raydz_command("checkpoint", "verify", run / STEPS[1], "--quick").exit_code == 0
    for target in ((run / STEPS[1],), (run, "--all")):
        result = raydz_command("checkpoint", "verify", *target)
        assert result.exit_code == 1
        assert f"{name} is damaged in 1 of 1 chunks of 262144 bytes: 0\n" in result.stdout
    found = json.loads(raydz_command("checkpoint", "verify", run / STEPS[1], "--json").stdout)["checkpoints"]
    assert found[0]["damage"][0]["file"] == name and found[0]["damage"][0]["chunks"] == [0]
    path.unlink()
    result = raydz_command("checkpoint", "verify", run / STEPS[1], "--quick")
    assert result.exit_code == 1 and f"{name} is missing" in result.stdout


def test_verify_of_all_names_a_manifest_that_cannot_be_used(run, raydz_command):
    manifest = run / STEPS[1] / "manifest.json"
    flipped = manifest.read_bytes().replace(b'"step":2', b'"step":3')
    assert flipped != manifest.read_bytes()
    manifest.write_bytes(flipped)
    result = raydz_command("checkpoint", "verify", run, "--all")
    assert result.exit_code == 1 and result.stdout.count("whole  ") == 2
    assert f"damaged   {run / STEPS[1]}: manifest.json cannot be used" in result.stdout
    assert raydz_command("checkpoint", "verify", run / STEPS[1]).exit_code == 1


# -- diff --------------------------------------------------------------------------------------------------------------


def test_diff_names_tensors_and_distances(run, raydz_command):
    result = raydz_command("checkpoint", "diff", run / STEPS[0], run / STEPS[1])
    assert result.exit_code == 1, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == f"A  {run / STEPS[0]}: step 1, 1 ranks"
    assert lines[-1] == "6 of 6 tensors differ; beside them: engine"
    # AdamW's first steps move each weight by the rate, whatever the gradient.
    (weight,) = [line for line in lines if "weight/first.bias" in line]
    assert weight.startswith("values") and "F32 [5]  5 of 5 elements, max |Δ| 0.01" in weight


def test_diff_of_equal_ones_exits_0(run, raydz_command):
    shutil.copytree(run / STEPS[2], run.parent / "copy")
    result = raydz_command("checkpoint", "diff", run, run.parent / "copy")
    assert result.exit_code == 0 and result.stdout.splitlines()[-1] == "0 of 6 tensors differ"


def test_diff_looks_at_what_is_asked_for(run, raydz_command):
    command = ("checkpoint", "diff", run / STEPS[0], run / STEPS[1], "--only", "exp_avg*/first.bias", "--json")
    found = json.loads(raydz_command(*command).stdout)
    assert [(item["kind"], item["name"]) for item in found["differences"]] == [
        ("exp_avg", "first.bias"), ("exp_avg_sq", "first.bias"),
    ]  # fmt: skip
    result = raydz_command("checkpoint", "diff", run, run, "--only", "nothing")
    assert result.exit_code == 1 and "matches no tensor" in result.stderr


# -- gc ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def torn(run) -> Path:
    """A save of two days ago that was never committed, and an unfinished file."""
    attempt = run / "step-0000000009" / "0123abcd"
    attempt.mkdir(parents=True)
    for name in ("rank-00000-of-00001.safetensors", ".raydz-tmp-left"):
        (attempt / name).write_bytes(bytes(1 << 20))
        os.utime(attempt / name, (time.time() - 2 * 86400,) * 2)
    return attempt


@pytest.mark.parametrize("below", ["", "tiny", "tiny/checkpoints"])
def test_gc_only_says_what_it_would_do(run, torn, raydz_command, below):
    before = sorted(run.rglob("*"))
    result = raydz_command("checkpoint", "gc", run.parents[1] / below, "--keep-last", "1")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[:3] == [
        f"checkpoint     {run / STEPS[0]}", f"checkpoint     {run / STEPS[1]}", f"not committed  {torn}",
    ]  # fmt: skip
    assert lines[3].startswith("3 with 1.0 MiB could be removed: --delete does")
    assert sorted(run.rglob("*")) == before


def test_gc_removes_when_told_to(run, torn, raydz_command):
    size = num_bytes(run / STEPS[0], torn)
    command = ("checkpoint", "gc", run, "--keep-last", "1", "--keep-every", "2", "--delete", "--json")
    found = json.loads(raydz_command(*command).stdout)
    assert found["checkpoints"] == [str(run / STEPS[0])] and found["orphans"] == [str(torn)]
    assert found["bytes"] == size and found["leftovers"] == 1 and found["faults"] == []
    assert sorted(path.name for path in run.iterdir()) == list(STEPS[1:])
    again = raydz_command("checkpoint", "gc", run, "--keep-last", "1", "--keep-every", "2", "--delete")
    assert again.stdout == "removed 0 with 0 B\n"


def test_gc_without_rules_removes_only_old_torn_saves(run, torn, raydz_command):
    raydz_command("checkpoint", "gc", run, "--older-than", "3d", "--delete")
    assert torn.exists()
    raydz_command("checkpoint", "gc", run, "--older-than", "36h", "--delete")
    assert not torn.exists() and sorted(path.name for path in run.iterdir()) == list(STEPS)


def test_gc_keeps_the_last_good_one_and_shows_the_damaged(run, raydz_command):
    data_file(run, STEPS[2]).unlink()
    result = raydz_command("checkpoint", "gc", run, "--keep-last", "1", "--delete")
    assert f"damaged, left  {run / STEPS[2]}" in result.stdout and "is missing" in result.stdout
    assert sorted(path.name for path in run.iterdir()) == list(STEPS[1:])


@pytest.mark.parametrize(
    ("text", "metric", "mode", "count"),
    [("loss", "loss", "min", 1), ("acc:max", "acc", "max", 1), ("loss:min:3", "loss", "min", 3)],
)
def test_keep_best_is_read(text, metric, mode, count):
    best = rules_of(1, 0, text).best
    assert (best.metric, best.mode, best.count) == (metric, mode, count)


@pytest.mark.parametrize("rules", [(None, 5, None), (None, 0, "loss"), (1, 0, "loss:least"), (1, 0, "loss:min:many")])
def test_rules_that_are_none_are_refused(rules):
    with pytest.raises(ConfigError):
        rules_of(*rules)


@pytest.mark.parametrize(
    ("text", "seconds"), [("90", 90), ("90s", 90), ("1.5m", 90), ("36h", 129600), (" 2D ", 172800)]
)
def test_durations_are_read(text, seconds):
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "d", "-1d", "1 week", "1d2h", "nan"])
def test_other_durations_are_refused(text):
    with pytest.raises(ConfigError, match="not a duration"):
        parse_seconds(text)


# -- cp ----------------------------------------------------------------------------------------------------------------


def test_cp_takes_the_newest_and_names_it_below_a_slash(run, raydz_command, tmp_path):
    result = raydz_command("checkpoint", "cp", run, f"{tmp_path}/copies/")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"{tmp_path}/copies/{STEPS[2]}: step 3, 1 files copied, ")
    exact = json.loads(raydz_command("checkpoint", "cp", run / STEPS[0], tmp_path / "mine", "--json").stdout)
    assert exact["uri"] == str(tmp_path / "mine") and exact["copied"] == 1 and exact["kept"] == 0
    for source, target in ((run / STEPS[2], tmp_path / "copies" / STEPS[2]), (run / STEPS[0], tmp_path / "mine")):
        assert raydz_command("checkpoint", "diff", source, target).exit_code == 0
        assert (source / "manifest.json").read_bytes() == (target / "manifest.json").read_bytes()


def test_cp_refuses_damage(run, raydz_command, tmp_path):
    flip(data_file(run, STEPS[0]))
    result = raydz_command("checkpoint", "cp", run / STEPS[0], tmp_path / "copy")
    assert result.exit_code == 1 and "checksum does not fit" in result.stderr
    assert raydz_command("checkpoint", "show", tmp_path / "copy").exit_code == 1


def test_a_uri_that_is_none_is_told_before_anything_is_read(run, raydz_command):
    result = raydz_command("checkpoint", "cp", run, "gs://bucket/x")
    assert result.exit_code == 1 and "not a place to store things" in result.stderr


@pytest.mark.s3
def test_all_of_them_work_on_a_bucket(run, s3_env, raydz_command, tmp_path):
    uri, endpoint = f"s3://{s3_env.bucket()}/runs/tiny/checkpoints", ("--endpoint-url", s3_env.endpoint_url)
    for step in STEPS:
        result = raydz_command(
            "checkpoint", "cp", run / step, f"{uri}/", "--to-endpoint-url", s3_env.endpoint_url, "--bandwidth-limit",
            "10MiB",
        )  # fmt: skip
        assert result.exit_code == 0, result.output
    assert raydz_command("checkpoint", "verify", uri, "--all", *endpoint).stdout.count("every checksum fits") == 3
    assert raydz_command("checkpoint", "diff", run, uri, "--b-endpoint-url", s3_env.endpoint_url).exit_code == 0
    found = raydz_command("checkpoint", "gc", uri, "--keep-last", "1", "--delete", *endpoint).stdout.splitlines()
    assert found[0] == f"checkpoint     {uri}/{STEPS[0]}" and found[2].startswith("removed 2 with ")
    raydz_command("checkpoint", "cp", uri, tmp_path / "back", *endpoint)
    assert (tmp_path / "back/manifest.json").read_bytes() == (run / STEPS[2] / "manifest.json").read_bytes()


def test_a_bar_is_shown_in_a_terminal_only(monkeypatch, capsys):
    with bytes_bar(100) as done:
        done(100)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with bytes_bar(2048) as done:
        done(1024)
        done(1024)
    assert "2.0" in capsys.readouterr().err

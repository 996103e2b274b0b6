"""Bad input ends every rank within seconds with a typed error, and leaves nothing that looks like a run."""

from __future__ import annotations

import contextlib
import subprocess
import time
from pathlib import Path

import pytest

from tests.support.seaweed import ACCESS_KEY, SECRET_KEY
from tests.train.runs import command, environment, journal, run_config, train_by_command, try_on_rank

LIMIT_S = 30.0
"""Of one call in a process that is up: a dead endpoint takes a few seconds, on a busy machine more."""


def cases(folder: Path) -> dict[str, tuple[dict, str, str]]:
    """Name -> (sections of the configuration, class of the error, words it must contain)."""
    (folder / "empty.txt").write_text("")
    (folder / "file").write_text("in the way")
    (folder / "bare").mkdir()
    return {
        "unknown key": ({"train": {"stepz": 3}}, "ConfigError", "train.stepz"),
        "batch triangle": (
            {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1}, "ConfigError", "train_batch_size",
        ),
        "missing path": ({"data": {"sources": [f"{folder}/nowhere.txt"]}}, "DataError", "nowhere.txt"),
        "no sources": ({"data": {"sources": []}}, "ConfigError", "data.sources"),
        "empty file": ({"data": {"sources": [f"{folder}/empty.txt"]}}, "DataError", "empty.txt"),
        "large vocabulary": ({"model": {"vocab_size": 270}}, "ConfigError", "270"),
        "checkpoint path": ({"checkpoint": {"dir": f"{folder}/file"}}, "StorageError", f"{folder}/file"),
        "cache path": ({"data": {"cache_dir": f"{folder}/file/cache"}}, "StorageError", f"{folder}/file"),
        "resume": ({"resume": f"{folder}/bare"}, "CheckpointError", f"{folder}/bare"),
        "secrets": ({"storage": {"secret_key": SECRET_KEY}}, "ConfigError", "storage.secret_key"),
        "offload": (
            {"zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}, "ConfigError",
            "offload_param",
        ),
    }  # fmt: skip


NAMES = [
    "unknown key", "batch triangle", "missing path", "no sources", "empty file", "large vocabulary", "checkpoint path",
    "cache path", "resume", "secrets", "offload",
]  # fmt: skip


def bad_config(folder: Path, name: str) -> tuple[dict, str, str]:
    """The whole configuration of a case, with MLflow on."""
    sections, kind, words = cases(folder)[name]
    return run_config(folder, tracking={"mlflow": True}, **sections), kind, words


def assert_no_trace(folder: Path) -> None:
    """No checkpoint, no step, no MLflow run of any status."""
    assert list(folder.rglob("manifest.json")) == [] and list(folder.rglob("*.safetensors")) == []
    assert journal(folder) == []
    assert list(folder.rglob("mlflow.db")) == []
    assert [path for path in folder.rglob("raydz-probe-*")] == []


@pytest.mark.parametrize("name", NAMES)
def test_every_rank_raises_the_same_typed_error(ranks, tmp_path, name):
    config, kind, words = bad_config(tmp_path, name)
    began = time.monotonic()
    told = ranks(2).run(try_on_rank, config, limit_s=LIMIT_S)
    assert time.monotonic() - began < LIMIT_S
    assert told[0] == told[1]
    assert told[0][0] == kind and words in told[0][1]
    assert SECRET_KEY not in told[0][1]
    assert_no_trace(tmp_path)


def test_names_are_those_of_the_cases(tmp_path):
    assert list(cases(tmp_path)) == NAMES


def assert_said(done, kind: str, words: str) -> None:
    assert done.returncode != 0
    assert f"{kind}: " in done.stderr and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr.split(f"{kind}: ")[0], "a user's mistake is told in words"
    assert SECRET_KEY not in done.stderr + done.stdout


@pytest.mark.parametrize(
    "name", ["missing path", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "missing path")]
)
def test_command_says_it_and_exits_nonzero(tmp_path, name):
    config, kind, words = bad_config(tmp_path, name)
    assert_said(train_by_command(tmp_path, config), kind, words)
    assert_no_trace(tmp_path)


@pytest.mark.slow
def test_torchrun_says_it_once_and_exits_nonzero(tmp_path):
    config, kind, words = bad_config(tmp_path, "empty file")
    done = train_by_command(tmp_path, config, ranks=2)
    assert done.returncode != 0
    assert done.stderr.count(f"{kind}: ") == 1 and words in done.stderr
    assert_no_trace(tmp_path)


def test_override_with_a_typo_is_told_with_the_closest_key(tmp_path):
    done = train_by_command(tmp_path, run_config(tmp_path), "--set", "train.step=3")
    assert_said(done, "ConfigError", "did you mean steps")


@pytest.mark.slow
def test_journal_that_rank_0_cannot_write_ends_both_ranks(tmp_path):
    (tmp_path / "runs/a/journal.jsonl").mkdir(parents=True)
    done = train_by_command(tmp_path, run_config(tmp_path), ranks=2)
    assert done.returncode != 0
    assert done.stderr.count("StorageError: ") == 1 and "journal.jsonl" in done.stderr
    assert list(tmp_path.rglob("manifest.json")) == []


_BROKEN_RANK = """
import os, sys
import raydz.train.build as build
from raydz.train.__main__ import main
from tests.train.runs import InterruptingLoss
if os.environ["RANK"] == "1":
    build.causal_lm_loss = InterruptingLoss(3)
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
def test_exception_of_one_rank_within_a_step_ends_the_other_within_seconds(tmp_path):
    (tmp_path / "broken.py").write_text(_BROKEN_RANK)
    launcher = [*command(tmp_path, run_config(tmp_path), ranks=2)]
    launcher[launcher.index("raydz.train") - 1 : launcher.index("raydz.train") + 1] = ["broken.py"]
    began = time.monotonic()
    done = subprocess.run(launcher, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and time.monotonic() - began < 50
    assert "Interrupted" in done.stderr
    assert len(journal(tmp_path)) == 3


# -- S3 ---------------------------------------------------------------------------------------------------------------


def try_with_environment(rank, world_size, env, config):
    from tests.checkpoint.test_s3 import with_environment

    return with_environment(rank, world_size, env, try_on_rank, config)


@pytest.mark.s3
@pytest.mark.parametrize("fault", ["bucket", "secret", "key id", "endpoint", "none at all"])
def test_s3_that_cannot_be_written_is_named_before_any_work(ranks, s3_server, bucket, tmp_path, fault):
    env = {
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_SHARED_CREDENTIALS_FILE": "/dev/null",
        "AWS_CONFIG_FILE": "/dev/null",
    }
    if fault != "none at all":
        env |= s3_server.env
    if fault == "secret":
        env["AWS_SECRET_ACCESS_KEY"] = "x" * 40
    if fault == "key id":
        env["AWS_ACCESS_KEY_ID"] = "AKIANOBODY0000000000"
    config = run_config(
        tmp_path,
        tracking={"mlflow": True},
        checkpoint={"dir": f"s3://{'no-such-bucket' if fault == 'bucket' else bucket}/runs"},
        storage={"endpoint_url": "http://127.0.0.1:1" if fault == "endpoint" else s3_server.endpoint_url},
    )
    told = ranks(2).run(try_with_environment, env, config, limit_s=LIMIT_S)
    assert told[0] == told[1]
    kind, text = told[0]
    words = {"bucket": "no-such-bucket", "endpoint": "endpoint"}.get(fault, "credentials")
    assert kind == "StorageError" and words in text
    assert ACCESS_KEY not in text and SECRET_KEY not in text and "x" * 40 not in text
    assert_no_trace(tmp_path)
    assert not (tmp_path / "runs/cache").exists(), "no text is tokenised for a run that cannot be saved"


@pytest.fixture(scope="module")
def bucket(s3_server):
    return s3_server.bucket()


@pytest.mark.s3
def test_run_that_saves_to_s3_leaves_its_checkpoints_there(ranks, s3_server, bucket, tmp_path):
    """The same configuration without a fault, so that the cases above fail for their reason alone."""
    config = run_config(
        tmp_path, checkpoint={"dir": f"s3://{bucket}/good"}, storage={"endpoint_url": s3_server.endpoint_url}
    )
    told = ranks(2).run(try_with_environment, s3_server.env, config)
    assert told == [("Result", "finished")] * 2
    with contextlib.closing(s3_server.client()) as client:
        keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=bucket, Prefix="good/")["Contents"]]
    assert [key for key in keys if "manifest" in key] == [
        f"good/a/checkpoints/step-{step:010d}/manifest.json" for step in (2, 4, 6)
    ]
    assert list(tmp_path.rglob("*.safetensors")) == []

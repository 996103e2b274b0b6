"""The command itself: quick, typed errors without a traceback, output that can be used again."""

from __future__ import annotations

import subprocess
import sys

import pytest

import raydz.config
from raydz.config import load
from raydz.version import __version__
from tests.cli.conftest import ROOT, run_raydz

DEMO = ROOT / "jobs" / "configs" / "demo.yaml"
LOADED = """
import sys
from raydz.cli.main import app
try:
    app(sys.argv[1:])
except SystemExit as end:
    assert not end.code, end.code
print("loaded:", *sorted(sys.modules))
"""


@pytest.mark.parametrize("arguments", [("--help",), ("--version",), ("checkpoint", "--help"), ("report", "--help")])
def test_help_and_version_load_nothing_that_takes_seconds(arguments):
    result = subprocess.run(
        [sys.executable, "-c", LOADED, *arguments], capture_output=True, text=True, timeout=60, check=True
    )
    loaded = set(result.stdout.rpartition("loaded:")[2].split())
    assert "typer" in loaded
    assert not loaded & {"torch", "ray", "mlflow", "boto3", "pyarrow", "numpy", "yaml"}


def test_the_version_is_printed(raydz_command):
    result = raydz_command("--version")
    assert result.stdout == f"raydz {__version__}\n"
    assert result.exit_code == 0


def test_the_printed_configuration_loads_again_as_the_same(raydz_command, tmp_path):
    result = raydz_command("config", DEMO, "--set", "train.steps=7", "--set", "run.name=again")
    assert result.exit_code == 0, result.output
    file = tmp_path / "again.yaml"
    file.write_text(result.stdout)
    again, once = load(file), load(DEMO, ["train.steps=7", "run.name=again"])
    assert again.model_dump() == once.model_dump()
    assert again.train.steps == 7


@pytest.mark.parametrize(
    ("options", "line"),
    [
        # 16 rows in micro-batches of 4: 2 workers take 2 each, 4 ranks take 1 each
        ((), "# 2 ranks: train_batch_size 16 = train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 2 * 2"),
        (
            ("--ranks", "4"),
            "# 4 ranks: train_batch_size 16 = train_micro_batch_size_per_gpu 4 * gradient_accumulation_steps 1 * 4",
        ),
    ],
)
def test_the_batch_is_cut_for_the_ranks(raydz_command, options, line):
    sizes = ("--set", "train_batch_size=16", "--set", "train_micro_batch_size_per_gpu=4")
    assert raydz_command("config", DEMO, *sizes, "--set", "scaling.num_workers=2", *options).stdout.endswith(
        f"{line}\n"
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("config", "no-such.yaml"), "cannot be read"),
        (("config", str(DEMO), "--set", "train.stepz=1"), "did you mean steps?"),
        (("config", str(DEMO), "--set", "train_batch_size=16", "--ranks", "5"), "ranks"),
        (("checkpoint", "ls", "gs://bucket"), "not a place to store things"),
        (("checkpoint", "show", "/no/such/folder"), "no committed checkpoint"),
        (("report", "--s3", "s3://"), "without a name"),
        (("report", "--s3", "s3://b", "--endpoint-url", "http://u:secret-1@host"), "credentials in an endpoint"),
    ],
)
def test_a_typed_error_is_printed_without_a_traceback_and_exits_1(arguments, said):
    result = run_raydz(*arguments)
    assert result.returncode == 1
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert "secret-1" not in result.stderr + result.stdout


def test_a_fault_of_raydz_itself_still_shows_its_traceback(raydz_command, monkeypatch):
    def fail(*_):
        raise RuntimeError("not a user's mistake")

    monkeypatch.setattr(raydz.config, "load", fail)
    result = raydz_command("config", DEMO)
    assert result.exit_code == 1
    assert isinstance(result.exception, RuntimeError)

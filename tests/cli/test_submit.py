"""The command line of `raydz submit`: what is refused before any cluster is asked, and what is passed on."""

from __future__ import annotations

import pytest

from raydz.units import parse_bytes

SOMETHING = ("--", "python", "train.py")


@pytest.fixture(autouse=True)
def no_cluster(monkeypatch):
    """An address where nothing listens, so that no test reaches a cluster of somebody else."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_API_SERVER_ADDRESS", "http://127.0.0.1:9")


def test_a_working_directory_over_the_limit_is_refused_with_its_largest_files(raydz_command, tmp_path):
    for name, size in {"weights.bin": "90MiB", "corpus.txt": "11MiB", "train.py": "1KiB"}.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(parse_bytes(size))  # no disk is used
    result = raydz_command("submit", "--working-dir", tmp_path, *SOMETHING)
    assert result.exit_code == 1
    assert "weights.bin 90.0 MiB; corpus.txt 11.0 MiB" in result.stderr and "at most 100.0 MiB" in result.stderr
    smaller = raydz_command("submit", "--working-dir", tmp_path, "--exclude", "*.bin", *SOMETHING)
    assert "no job server of a Ray cluster answers" in smaller.stderr, "only the cluster is missing now"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "no job server of a Ray cluster answers"),
        (("--working-dir", "nowhere"), "not a folder"),
        (("--run-name", "a/b"), "not a name for a run"),
        (("--env", "COLOUR"), "NAME=VALUE"),
        (("--env", "AWS_SECRET_ACCESS_KEY=abcdef"), "credentials do not travel"),
    ],
)
def test_what_cannot_work_is_a_typed_error(raydz_command, tmp_path, monkeypatch, arguments, said):
    monkeypatch.chdir(tmp_path)
    result = raydz_command("submit", *arguments, *SOMETHING)
    assert result.exit_code == 1 and said in result.stderr
    assert "abcdef" not in result.output


def test_the_address_on_the_command_line_wins_over_the_environment(raydz_command, tmp_path):
    result = raydz_command("submit", "--working-dir", tmp_path, "--address", "http://127.0.0.1:11", *SOMETHING)
    assert "where:  http://127.0.0.1:11" in result.stderr


def test_a_command_is_wanted(raydz_command):
    assert raydz_command("submit").exit_code == 2

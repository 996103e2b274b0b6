"""The entry script: what it prints, and its exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "jobs" / "prepare_data.py"


def run(*arguments):
    return subprocess.run([sys.executable, str(SCRIPT), *map(str, arguments)], capture_output=True, text=True)


def test_summary_tells_tokens_of_each_set(tmp_path):
    out = run("--input", "sample:wordnet", "--output", tmp_path, "--vocab-size", 512, "--eval-fraction", 0.05)
    assert out.returncode == 0, out.stderr
    assert "512 ids" in out.stdout and "heldout" in out.stdout and "nats per token" in out.stdout
    assert len(list(tmp_path.glob("*/train/index.json"))) == 1


def test_a_user_error_is_short_and_the_exit_code_is_1(tmp_path):
    out = run("--input", tmp_path / "nowhere.txt", "--output", tmp_path)
    assert out.returncode == 1 and "nowhere.txt" in out.stderr and "Traceback" not in out.stderr

"""A DeepSpeed script with only its import changed, against the numbers that DeepSpeed itself gave.

`recorded.json` is the output of

    DS_ACCELERATOR=cpu DS_SKIP_CUDA_CHECK=1 OMP_NUM_THREADS=1 python tests/deepspeed/record.py

under DeepSpeed 0.19.8 and torch 2.13 on two gloo ranks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.deepspeed.cases import CASES, SCRIPT, arguments, run_with_its_import_changed

RECORDED = json.loads(Path(__file__).with_name("recorded.json").read_text())["script"]


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"result-{rank}.json").read_text()) for rank in range(2)]


def assert_as_recorded(name: str, found: list[dict[str, Any]]) -> None:
    for ours, theirs in zip(found, RECORDED[name], strict=True):
        assert ours["losses"] == pytest.approx(theirs["losses"], abs=1e-4)
        assert ours["rates"] == pytest.approx(theirs["rates"], rel=1e-8)
        assert (ours["at"], ours["steps"]) == (theirs["at"], theirs["steps"])
        if theirs["norms"]:  # DeepSpeed has none at stage 0
            assert ours["norms"] == pytest.approx(theirs["norms"], rel=1e-4)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_rates_are_deepspeeds(ranks, tmp_path: Path, name: str) -> None:
    ranks(2).run(run_with_its_import_changed, str(tmp_path), arguments(name, tmp_path))
    assert_as_recorded(name, results(tmp_path))


def test_the_script_is_short_and_deepspeeds_own() -> None:
    code = [line for line in SCRIPT.read_text().splitlines() if line.strip()]
    assert len(code) <= 36 and "raydz" not in SCRIPT.read_text()
    assert SCRIPT.read_text().count("import deepspeed\n") == 1


@pytest.mark.slow
def test_it_runs_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.read_text().replace("import deepspeed\n", "from raydz import deepspeed\n"))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    here = str(Path(__file__).parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": here}
    command = [*launcher, *arguments("stage 3", tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert_as_recorded("stage 3", results(tmp_path))

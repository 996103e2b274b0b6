"""The command in this process, and in one of its own where packages can be blocked."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

ROOT = Path(__file__).parents[2]

WITHOUT = """
import importlib.abc, sys

blocked = sys.argv.pop(1).split(",")

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{fullname} is blocked in this test", name=fullname)

sys.meta_path.insert(0, Blocker())
sys.argv[0] = "raydz"
from raydz.cli.main import app
app()
"""


def run_raydz(
    *arguments: str, blocked: tuple[str, ...] = (), home: Path | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`raydz arguments` in a process of its own, without the developer's AWS and Ray settings."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith(("AWS_", "RAY_", "MLFLOW_"))}
    if home is not None:
        inherited["HOME"] = str(home)
    command = [sys.executable, "-c", WITHOUT, ",".join(blocked), *arguments]
    return subprocess.run(
        command,
        cwd=ROOT,
        env={**inherited, "AWS_EC2_METADATA_DISABLED": "true", **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def raydz_command() -> Callable[..., Result]:
    """Invoke the command in this process; the logging that it sets up is undone."""
    from raydz.cli.main import app

    def invoke(*arguments: object) -> Result:
        logger = logging.getLogger("raydz")
        before = (list(logger.handlers), logger.level, logger.propagate)
        try:
            return CliRunner().invoke(app, [str(argument) for argument in arguments])
        finally:
            logger.handlers, logger.level, logger.propagate = before

    return invoke

"""The engine runs under plain torchrun on machines that have neither ray nor mlflow nor boto3."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCKED = ("ray", "mlflow", "boto3", "botocore", "s3transfer", "awscrt")
NEED_THEM = ("orchestrate/", "__main__.py", "tracking/mlflow.py", "ops/adamw_triton.py", "ops/reduction_triton.py")
NEED_THEM += ("ops/quantise_triton.py",)

IMPORT_WITHOUT = """
import importlib, importlib.abc, sys, traceback

blocked, names = (argument.split(",") for argument in sys.argv[1:])

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.split(".")[0] in blocked:
            raise ModuleNotFoundError(f"{fullname} is blocked in this test", name=fullname)

sys.meta_path.insert(0, Blocker())
failed = 0
for name in names:
    try:
        importlib.import_module(name)
    except Exception:
        failed += 1
        print(f"import {name}", traceback.format_exc(), sep="\\n")
sys.exit(failed != 0)
"""


def modules() -> list[str]:
    """Dotted names of all modules of raydz that must import without the blocked packages."""
    package = ROOT / "raydz"
    names = []
    for path in sorted(package.rglob("*.py")):
        relative = path.relative_to(package)
        if not relative.as_posix().startswith(NEED_THEM):
            parts = relative.with_suffix("").parts
            names.append(".".join(("raydz", *parts)).removesuffix(".__init__"))
    return names


def import_without(blocked: tuple[str, ...], names: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", IMPORT_WITHOUT, ",".join(blocked), ",".join(names)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_all_but_the_orchestration_imports_without_ray_mlflow_and_boto3():
    result = import_without(BLOCKED, modules())
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_configuration_and_the_plan_import_without_torch():
    torchless = ("raydz.config", "raydz.plan", "raydz.errors", "raydz.units")
    names = [name for name in modules() if name.startswith(torchless)]
    result = import_without((*BLOCKED, "torch"), names)
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_blocked_import_is_seen():
    result = import_without(("torch",), ["raydz.ops.rounding"])
    assert result.returncode == 1
    assert "torch is blocked" in result.stdout

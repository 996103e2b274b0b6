"""Installing raydz: the wheel with kernels, the wheel without, and what a machine without a compiler is told."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("scikit_build_core")
pytest.importorskip("nanobind")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "CMakeLists.txt", "LICENSE", "README.md", "native", "raydz")


@pytest.fixture
def tree(tmp_path):
    """A copy of what a build reads, without what earlier builds left behind."""
    copy = tmp_path / "tree"
    copy.mkdir()
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        elif source.exists():
            shutil.copy(source, copy / name)
    return copy


def build(tree: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
        ".",
    ]
    tools = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    variables = {**os.environ, "PATH": tools, **environment}
    return subprocess.run(command, cwd=tree, env=variables, capture_output=True, text=True, timeout=300, check=False)


def contents(tree: Path) -> tuple[str, list[str]]:
    (wheel,) = (tree / "out").glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return wheel.name, archive.namelist()


def test_a_wheel_carries_the_kernels_and_the_sample(tree):
    result = build(tree)
    assert result.returncode == 0, result.stdout + result.stderr
    _, names = contents(tree)
    assert any(name.startswith("raydz/_native") and name.endswith(".so") for name in names)
    sample = ROOT / "raydz" / "data" / "sample"
    expected = {f"raydz/data/sample/{path.name}" for path in sample.glob("*") if path.is_file()}
    assert expected <= set(names)


def test_a_wheel_without_kernels_is_pure_and_needs_no_compiler(tree):
    result = build(tree, RAYDZ_NO_NATIVE="1", CXX="/nonexistent/c++")
    assert result.returncode == 0, result.stdout + result.stderr
    wheel, names = contents(tree)
    assert wheel.endswith("-py3-none-any.whl")
    assert "raydz/ops/adamw.py" in names
    assert not [name for name in names if name.endswith(".so")]


def test_a_machine_without_a_compiler_is_told_both_ways_out(tree):
    result = build(tree, CXX="/nonexistent/c++")
    assert result.returncode != 0
    said = result.stdout + result.stderr
    assert "apt-get install g++" in said
    assert "RAYDZ_NO_NATIVE=1" in said

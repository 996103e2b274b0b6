"""The house rules that no reviewer should have to watch: who may import whom.

Reads every file of `raydz/` with `ast`, imports inside functions and under TYPE_CHECKING included. A new package or
top-level module must be given a layer here before anything passes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "raydz"

LAYERS = {
    0: {"errors", "exits", "units", "log", "version"},
    1: {"config"},
    2: {"dist", "ops", "storage", "_native"},
    3: {"optim", "offload", "tracking"},
    4: {"zero", "moe", "models", "data"},
    5: {"checkpoint", "hf", "engine"},
    6: {"train", "infer", "plan"},
    7: {"rlhf"},
    8: {"orchestrate"},
    9: {"cli", "deepspeed", "__main__"},
    10: {"raydz"},  # raydz/__init__.py, the face that users import
}
LAYER_OF = {name: layer for layer, names in LAYERS.items() for name in names}

# Third-party packages and the only places (folder or file) that may import them.
PLACES = {
    "ray": ("orchestrate/",),
    "mlflow": ("tracking/mlflow.py",),
    "pyarrow": ("data/",),
    "boto3": ("storage/",),
    "botocore": ("storage/",),
    "s3transfer": ("storage/",),
    "awscrt": ("storage/",),
}
NEVER = {("zero", "models")}  # the engine core sees nn.Module
LAZY = {"boto3", "botocore", "s3transfer", "awscrt"}  # imported when first used
# `raydz plan` starts at once.
NO_TORCH = ("config/", "plan/", "errors.py", "exits.py", "units.py", "log.py", "version.py")


@dataclass(frozen=True)
class Import:
    """One import of `target` (dotted) by the file `source` (relative to the package)."""

    source: str
    line: int
    target: str
    at_import_time: bool

    @property
    def package(self) -> str:
        first = self.source.split("/")[0].removesuffix(".py")
        return "raydz" if first == "__init__" else first

    def __str__(self) -> str:
        return f"raydz/{self.source}:{self.line} imports {self.target}"


def imports_of(root: Path) -> list[Import]:
    found = []
    for path in sorted(root.rglob("*.py")):
        tree = ast.parse(path.read_text(), str(path))
        in_functions = {
            id(node)
            for function in ast.walk(tree)
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
            for node in ast.walk(function)
        }
        source = path.relative_to(root).as_posix()
        for node in ast.walk(tree):
            for target in targets_of(node, source, root):
                found.append(Import(source, node.lineno, target, id(node) not in in_functions))
    return found


def targets_of(node: ast.AST, source: str, root: Path) -> Iterator[str]:
    """Dotted names that an import statement imports; `from raydz import x` gives raydz.x if x is a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    if not isinstance(node, ast.ImportFrom):
        return
    base = node.module or ""
    if node.level:
        parents = ("raydz", *Path(source).parts[:-1])
        base = ".".join([*parents[: len(parents) + 1 - node.level], *filter(None, [node.module])])
    for alias in node.names:
        is_module = base == "raydz" and (alias.name in LAYER_OF or (root / alias.name).exists())
        yield f"{base}.{alias.name}" if is_module else base


def package_of(target: str) -> str | None:
    """The package of raydz that a dotted name lies in; None for a third party."""
    parts = target.split(".")
    if parts[0] != "raydz":
        return None
    return parts[1] if len(parts) > 1 else "raydz"


def faults(root: Path) -> list[str]:
    imports = imports_of(root)
    return [*unknown(root), *upward(imports), *misplaced(imports), *cycles(imports)]


def unknown(root: Path) -> Iterator[str]:
    for path in sorted(root.iterdir()):
        is_package = path.is_dir() and any(path.rglob("*.py"))
        if (is_package or path.suffix == ".py") and path.stem not in LAYER_OF and path.stem != "__init__":
            yield f"raydz/{path.name} has no layer in tests/test_layers.py"


def upward(imports: list[Import]) -> Iterator[str]:
    for item in imports:
        target = package_of(item.target)
        if target is not None and LAYER_OF.get(target, 99) > LAYER_OF.get(item.package, 99):
            yield f"{item}, which lies higher"
        elif (item.package, target) in NEVER:
            yield f"{item}, which it must not know"


def misplaced(imports: list[Import]) -> Iterator[str]:
    for item in imports:
        name = item.target.split(".")[0]
        if name in PLACES and not item.source.startswith(PLACES[name]):
            yield f"{item}, allowed only in {', '.join(PLACES[name])}"
        elif name in LAZY and item.at_import_time:
            yield f"{item} at import time; import it where it is first used"
        elif name == "torch" and item.source.startswith(NO_TORCH):
            yield f"{item}, which takes seconds to load"


def cycles(imports: list[Import]) -> Iterator[str]:
    """Packages that reach themselves through others."""
    edges: dict[str, set[str]] = {}
    for item in imports:
        target = package_of(item.target)
        if target is not None and target != item.package:
            edges.setdefault(item.package, set()).add(target)
    for start in sorted(edges):
        reached, waiting = set(), set(edges[start])
        while waiting:
            here = waiting.pop()
            reached.add(here)
            waiting |= edges.get(here, set()) - reached
        if start in reached:
            yield f"raydz.{start} is part of an import cycle through {sorted(reached)}"


def test_every_import_keeps_the_house_rules():
    found = faults(ROOT)
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("path", "code", "fault"),
    [
        ("ops/a.py", "from raydz.zero import x", "ops/a.py:1 imports raydz.zero, which lies higher"),
        ("ops/a.py", "def f():\n    import raydz.zero.unit", "ops/a.py:2 imports raydz.zero.unit, which lies higher"),
        ("ops/a.py", "from ..zero import x", "imports raydz.zero, which lies higher"),
        ("ops/a.py", "from raydz import engine", "imports raydz.engine, which lies higher"),
        ("ops/a.py", "from raydz import fit", "imports raydz, which lies higher"),
        ("zero/a.py", "from raydz.models import x", "imports raydz.models, which it must not know"),
        ("train/a.py", "import ray.train", "allowed only in orchestrate/"),
        ("tracking/a.py", "import mlflow", "allowed only in tracking/mlflow.py"),
        ("checkpoint/a.py", "import boto3", "allowed only in storage/"),
        ("storage/a.py", "import boto3", "at import time"),
        ("models/a.py", "import pyarrow as pa", "allowed only in data/"),
        ("config/a.py", "import torch.nn", "takes seconds"),
        ("helpers.py", "", "helpers.py has no layer"),
    ],
)
def test_a_broken_rule_is_seen(tmp_path, path, code, fault):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert any(fault in found for found in faults(tmp_path)), faults(tmp_path)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("ops/a.py", "from raydz import log\nfrom raydz.version import __version__"),
        ("ops/a.py", "from . import native\nfrom .native import load"),
        ("storage/a.py", "def f():\n    import boto3"),
        ("orchestrate/a.py", "import ray"),
        ("tracking/mlflow.py", "import mlflow"),
        ("__init__.py", "from raydz.engine import Engine"),
    ],
)
def test_what_is_allowed_passes(tmp_path, path, code):
    file = tmp_path / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(code)
    assert faults(tmp_path) == []


def test_packages_of_one_layer_may_not_import_each_other_in_a_circle(tmp_path):
    for package, other in (("data", "moe"), ("moe", "models"), ("models", "data")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "a.py").write_text(f"import raydz.{other}.a")
    assert len(faults(tmp_path)) == 3
    assert "raydz.data is part of an import cycle through ['data', 'models', 'moe']" in faults(tmp_path)[0]


def test_no_layer_is_named_like_a_standard_module():
    assert not set(LAYER_OF) & sys.stdlib_module_names

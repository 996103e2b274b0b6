"""Which of the packages that raydz asks for are here, in which version, and what is lost without them.

Neighbours: `report.py` asks. Nothing is imported: versions come from the installed metadata, which takes no time.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import sys
from collections.abc import Callable, Iterator, Sequence

from raydz.cli.finding import Finding
from raydz.version import __version__

WITHOUT = {
    "torch": "nothing trains",
    "ray": "no raydz.fit and no jobs; torchrun and `python -m raydz.train` work",
    "mlflow": "runs keep their journal alone, with tracking.mlflow=false",
    "pyarrow": "no data is prepared",
    "boto3": "no s3:// path works",
    "awscrt": "s3:// uploads are checked by CRC32 instead of CRC64NVME",
}
"""Packages that get a line of their own, and what is lost without each."""

_MODULES = {"pyyaml": "yaml"}
_EXTRAS = {"awscrt": ("boto3", "boto3[crt]")}  # not asked for by its own name


def installed_version(distribution: str) -> str | None:
    """Version of a distribution that is installed and whose module can be found, else None."""
    module = _MODULES.get(distribution, distribution.replace("-", "_"))
    try:
        found = importlib.util.find_spec(module) is not None
    except ImportError:
        return None
    try:
        return importlib.metadata.version(distribution) if found else None
    except importlib.metadata.PackageNotFoundError:
        return None


def interpreter() -> Iterator[Finding]:
    """raydz and the Python that runs it."""
    yield Finding("raydz", "ok", __version__)
    yield Finding(
        "python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}, {sys.executable}"
    )


def packages() -> Iterator[Finding]:
    """Every package that the installed raydz asks for."""
    try:
        requirements = importlib.metadata.requires("raydz") or []
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "odd", "raydz runs from a folder, not installed", "pip install -e .")
        return
    yield from check(requirements, installed_version)


def check(requirements: Sequence[str], version_of: Callable[[str], str | None]) -> Iterator[Finding]:
    """A finding for each main package, for each other one that is wrong, and one for all the others."""
    from packaging.requirements import Requirement

    asked = [item for item in map(Requirement, requirements) if item.marker is None or item.marker.evaluate()]
    fine: list[str] = []
    for item in asked:
        version = version_of(item.name)
        finding = _judge(item.name, version, str(item), version is not None and version in item.specifier)
        if finding.state == "ok" and item.name not in WITHOUT:
            fine.append(f"{item.name} {version}")
        else:
            yield finding
    for name, (parent, text) in _EXTRAS.items():
        if any(item.name == parent for item in asked):
            yield _judge(name, version_of(name), text, fits=True)
    yield Finding("other packages", "ok", ", ".join(fine))


def _judge(name: str, version: str | None, wanted: str, fits: bool) -> Finding:
    remedy = f"pip install '{wanted}'"
    if version is None:
        return Finding(name, "broken", f"not importable: {WITHOUT.get(name, 'raydz needs it')}", remedy)
    if not fits:
        return Finding(name, "odd", f"{version}, where raydz was made for another version", remedy)
    return Finding(name, "ok", version)

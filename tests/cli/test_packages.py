"""Versions are held against what raydz asks for."""

from __future__ import annotations

import pytest

from raydz.cli.packages import check, installed_version

HERE = {"torch": "2.13.0+cpu", "boto3": "1.44.8", "awscrt": "0.38.0", "pyyaml": "6.0", "pydantic": "2.14.4"}


def states(requirements: list[str], here: dict[str, str]) -> dict[str, str]:
    return {finding.name: finding.state for finding in check(requirements, here.get)}


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("torch>=2.11", {"torch": "ok", "other packages": "ok"}),
        ("torch>=3", {"torch": "odd", "other packages": "ok"}),
        ("mlflow<3.18,>=3", {"mlflow": "broken", "other packages": "ok"}),
        ("boto3[crt]>=1.36", {"boto3": "ok", "awscrt": "ok", "other packages": "ok"}),
        ("pydantic<3,>=2.7", {"other packages": "ok"}),
        ("pydantic<2", {"pydantic": "odd", "other packages": "ok"}),
        ("safetensors>=0.4", {"safetensors": "broken", "other packages": "ok"}),
        ('pytest>=8; extra == "dev"', {"other packages": "ok"}),
    ],
)
def test_a_package_is_fine_odd_or_missing(requirement, expected):
    assert states([requirement], HERE) == expected


def test_the_remedy_is_the_requirement_itself():
    (found, _) = check(["ray[default,train]<2.61,>=2.60"], {"ray": "2.40"}.get)
    assert found.remedy == "pip install 'ray[default,train]<2.61,>=2.60'"
    assert "2.40" in found.detail


def test_packages_that_are_fine_share_a_line():
    (found,) = check(["pydantic>=2", "pyyaml>=6"], HERE.get)
    assert found.detail == "pydantic 2.14.4, pyyaml 6.0"


def test_a_version_is_that_of_the_distribution_and_needs_its_module():
    import yaml

    assert installed_version("pyyaml") == yaml.__version__
    assert installed_version("no-such-package") is None

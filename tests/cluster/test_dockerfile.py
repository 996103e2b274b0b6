"""cluster/Dockerfile: its words, since there is no Docker here to build it."""

from __future__ import annotations

import re

import ray

from tests.support.runs import REPOSITORY

TEXT = (REPOSITORY / "cluster" / "Dockerfile").read_text()


def test_the_base_has_the_ray_that_is_pinned():
    (base,) = re.findall(r"^ARG BASE=rayproject/ray:(\d+\.\d+\.\d+)-py3\d+-cu\d+$", TEXT, re.MULTILINE)
    pinned = re.search(r"^ray==(\S+)$", (REPOSITORY / "constraints-dev.txt").read_text(), re.MULTILINE)
    assert pinned is not None and base == pinned[1] == ray.__version__


def test_what_is_copied_is_there():
    for line in re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE):
        for source in line.split()[:-1]:
            assert (REPOSITORY / source).exists(), source


def test_the_build_stage_has_all_that_the_wheel_is_made_from():
    copied = " ".join(re.findall(r"^COPY (?!--from)(.+)$", TEXT, re.MULTILINE))
    assert all(
        name in copied for name in ("pyproject.toml", "CMakeLists.txt", "native", "raydz", "README.md", "LICENSE")
    )
    assert "RAY_AUTH_MODE=token" in TEXT and "USER ray" in TEXT.split("FROM ${BASE}")[-1]

"""Fixtures of the configuration's tests."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import raydz.config

REPOSITORY = Path(raydz.config.__file__).parents[2]


@pytest.fixture
def configs() -> Path:
    """The configurations that the repository ships."""
    return REPOSITORY / "jobs" / "configs"


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str], Path]:
    """Write a file below the test's folder and return its path."""

    def write_file(name: str, text: str) -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture) -> Iterator[Callable[[], str]]:
    """What raydz warned about, as one text; works whether or not an earlier test called `log.setup`."""
    root = logging.getLogger("raydz")
    propagate, root.propagate = root.propagate, True
    try:
        yield lambda: "\n".join(r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    finally:
        root.propagate = propagate

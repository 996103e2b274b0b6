"""Lines for people and lines for machines."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from raydz import log
from raydz.tracking import Tracker


@pytest.fixture(autouse=True)
def logger_as_before():
    root = logging.getLogger("raydz")
    before = (root.level, root.propagate, list(root.handlers))
    yield
    root.handlers[:] = before[2]
    root.setLevel(before[0])
    root.propagate = before[1]


def start(run_dir: Path) -> Tracker:
    return Tracker.start(
        run_dir=run_dir, run_key="r", run_name="r", config_text="", params={}, mlflow_uri=None, experiment="e"
    )


def test_an_event_is_one_line_where_the_log_is_json(capsys, tmp_path: Path) -> None:
    log.setup(0, as_json=True)
    start(tmp_path).log_event("checkpoint", {"step": 5, "note": "password=hunter22\nsecond"})
    log.get("raydz.x").warning("two\nlines %d", 7)
    started, checkpoint, warning = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert started["event"] == "start"
    assert (checkpoint["event"], checkpoint["step"], checkpoint["attempt"], checkpoint["rank"]) == (
        "checkpoint",
        5,
        0,
        0,
    )
    assert "hunter22" not in json.dumps(checkpoint)
    assert (warning["level"], warning["message"], warning["logger"]) == ("WARNING", "two\nlines 7", "raydz.x")
    assert "event" not in warning


def test_events_stay_out_of_the_text_for_people(capsys, tmp_path: Path) -> None:
    log.setup(0)
    start(tmp_path).log_event("checkpoint", {"step": 5})
    log.get("raydz.x").info("hello")
    assert [line.partition("INFO ")[2] for line in capsys.readouterr().err.splitlines()] == ["hello"]


def test_tracebacks_are_part_of_the_line(capsys) -> None:
    log.setup(3, as_json=True)
    try:
        raise ZeroDivisionError("a bug")
    except ZeroDivisionError:
        log.get("raydz.x").exception("failed")
    log.event("quiet", {})
    [line] = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert line["rank"] == 3 and "ZeroDivisionError: a bug" in line["traceback"]

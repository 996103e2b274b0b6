"""The dashboard asks for metrics that exist, of the data source that is chosen in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from raydz.orchestrate.gauges import NAMES

FILE = Path(__file__).parents[2] / "cluster" / "grafana" / "raydz.json"


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    return json.loads(FILE.read_text())


def test_every_metric_that_is_queried_exists(dashboard) -> None:
    asked = set(re.findall(r"\bray_(\w+)", FILE.read_text()))
    assert asked - set(NAMES.values()) == set()
    wanted = ("step_time_s", "tokens_per_s", "memory_peak_bytes", "comm_share", "loss", "step", "restarts")
    assert {f"raydz_{name}" for name in wanted} <= asked


def test_every_panel_has_the_data_source_of_the_variable_and_only_the_chosen_runs(dashboard) -> None:
    variables = {variable["name"]: variable for variable in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource" and variables["datasource"]["query"] == "prometheus"
    chosen = {"type": "prometheus", "uid": "${datasource}"}
    assert variables["run"]["datasource"] == chosen
    for panel in dashboard["panels"]:
        assert panel["datasource"] == chosen
        for target in panel["targets"]:
            assert target["datasource"] == chosen and 'run=~"$run"' in target["expr"], panel["title"]


def test_panels_have_ids_and_places_of_their_own(dashboard) -> None:
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for place in (panel["gridPos"] for panel in panels):
        assert place["x"] + place["w"] <= 24
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken
        taken |= cells

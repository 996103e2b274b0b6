"""The figures of `tests/bench/checkpoint_scale.py`: of the right state, and megabytes where the state is gigabytes."""

from __future__ import annotations

import base64
import json

import pytest

from tests.bench.checkpoint_scale import SHAPES, CountingStore, flat_groups, layouts_of, simulate_load, simulate_save

PARAMETERS_8B = 8_030_261_248
"""Meta's Llama 3 8B, by its model card's configuration."""


@pytest.fixture(scope="module")
def groups():
    return flat_groups(SHAPES["8b"])


def simulate(groups, saved: int, loaded: int):
    store = CountingStore()
    figures = simulate_save(layouts_of(groups, saved), saved, store)
    figures |= simulate_load(layouts_of(groups, loaded), loaded, store, samples=6)
    return figures, json.loads(store.objects["step-0000000001/manifest.json"])["body"]


def test_manifest_of_8b_on_128_ranks_is_megabytes_of_which_most_are_checksums(groups):
    figures, body = simulate(groups, 128, 96)
    headers = figures["state_bytes"] - 12 * PARAMETERS_8B
    assert 0 < headers < 128 * (1 << 20), "weight and two moments in fp32, once each"
    sums = sum(len(base64.b64decode(file["chunk_crcs"])) for file in body["files"])
    assert sums == 4 * sum(-(-file["bytes"] // (256 << 10)) for file in body["files"])
    assert sums * 4 / 3 < figures["manifest_bytes"] < sums * 4 / 3 + (1 << 20) < 3 << 20
    pieces = sum(tensor[4] for tensor in body["tensors"])
    assert pieces > 25_000
    assert sum(map(len, body["pieces"].values())) < 8 * pieces, "a piece has four numbers"


def test_commit_asks_for_each_file_once_and_puts_one_manifest(groups):
    figures, body = simulate(groups, 16, 2)
    assert figures["commit_requests"] == len(body["files"]) + 1 == 17
    assert figures["heads_per_rank"] in (8, 8.5, 9), "half of the files, and the one at the border of the ranks"


@pytest.mark.parametrize(("saved", "loaded"), [(16, 12), (2, 100)])
def test_ranks_of_another_world_read_hardly_more_than_they_need(groups, saved, loaded):
    figures, _ = simulate(groups, saved, loaded)
    assert 1.0 <= figures["read_per_needed"] <= 1.1
    assert figures["reads_per_rank"] * 8e6 > 12 * PARAMETERS_8B / loaded / 8, "reads are megabytes"

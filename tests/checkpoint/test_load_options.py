"""Part of a checkpoint, renamed parameters, and what ranks hold alike: read once, and reported without a gap."""

from __future__ import annotations

import json
import logging
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from raydz.checkpoint import KeyMap, load_plan, reader
from raydz.errors import CheckpointError, ConfigError
from raydz.storage import ObjectChanged
from raydz.storage.local import LocalStore
from tests.checkpoint.states import (
    CHUNK,
    Odd,
    Setup,
    assert_same_bits,
    build,
    data_files,
    only_checkpoint,
    stored_pieces,
    stored_tensors,
    train,
    train_and_save,
)

SETUP = Setup(stage=3)
NAMES = ("p0", "first.p1", "p2", "first.p3", "p4", "frozen")
"""Of `Odd` with the usual shapes; the one without elements has no piece."""


class Wrapped(nn.Module):
    """`Odd` one level deeper: every name has another beginning."""

    def __init__(self, shapes=SETUP.shapes) -> None:
        super().__init__()
        self.body = Odd(shapes, tied=False)

    def forward(self, x):
        return self.body(x)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks(2).run(train_and_save, SETUP, str(root), 2)
    return root


def held(engine) -> dict[str, torch.Tensor]:
    """This rank's pieces by kind, name and place, copied."""
    from raydz.checkpoint import state_pieces

    pieces = state_pieces(engine.sharded, engine.optimizer, saving=False)
    return {f"{p.kind}/{p.name}[{p.start}:{p.stop}]": p.read().clone() for p in pieces}


def load(rank, world_size, setup, uri, options, wrap=False):
    """State before and after a load by `options`, counters, report; or the error."""
    engine = build(setup, Wrapped(setup.shapes) if wrap else None)
    train(engine, 1, 3)
    before = held(engine)
    try:
        _, client = engine.load_checkpoint(uri, **options)
    except (CheckpointError, ConfigError) as error:
        after = held(engine)
        untouched = all(torch.equal(before[key], after[key]) for key in before)
        engine.destroy()
        return {"what": error.what, "got": str(error.got), "where": str(error.where), "untouched": untouched}
    after, report = held(engine), engine.load_report
    engine.destroy()
    numpy = [{key: tensor.float().numpy() for key, tensor in state.items()} for state in (before, after)]
    return {"before": numpy[0], "after": numpy[1], "steps": engine.global_steps, "client": client, "report": report}


def assert_loaded(found: dict, saved: Path, is_loaded, rename=lambda name: name) -> None:
    """Exactly the pieces for which `is_loaded(kind, name)` have the stored bits; the others are as before."""
    stored = stored_tensors(only_checkpoint(saved))
    for key, values in found["after"].items():
        kind, name, start, stop = key.split("/")[0], *split_key(key)
        wanted = stored[kind, rename(name)][start:stop] if is_loaded(kind, name) else found["before"][key]
        assert values.tobytes() == wanted.astype("f4").tobytes(), key


def split_key(key: str) -> tuple[str, int, int]:
    name, _, place = key.partition("/")[2].rstrip("]").rpartition("[")
    start, stop = place.split(":")
    return name, int(start), int(stop)


# -- parts of a checkpoint --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 3])
def test_weights_only_leaves_optimizer_and_counters_alone(ranks, saved, world_size):
    for found in ranks(world_size).run(load, SETUP, str(saved), {"weights_only": True}):
        assert_loaded(found, saved, lambda kind, _: kind in ("weight", "buffer"))
        assert (found["steps"], found["client"]) == (3, {"epoch": 3})
        assert {kind for _, kind in found["report"].loaded} == {"weight", "buffer"}
        assert found["report"].unused == found["report"].kept == ()


@pytest.mark.parametrize("world_size", [1, 2])
def test_only_what_the_patterns_name_is_loaded(ranks, saved, world_size):
    options = {"only": ["first.*", "p2"]}
    results = ranks(world_size).run(load, SETUP, str(saved), options)
    for found in results:
        assert_loaded(found, saved, lambda _, name: name in ("first.p1", "first.p3", "p2"))
        assert found["steps"] == 3, "a part of the state is no resume"
        assert {name for name, _ in found["report"].loaded} == {"first.p1", "first.p3", "p2"}
        assert len(found["report"].loaded) == 9
    only_weights = load(0, 1, Setup(), str(saved), options | {"weights_only": True})
    assert_loaded(only_weights, saved, lambda kind, name: kind == "weight" and name in ("first.p1", "first.p3", "p2"))


def test_pattern_that_meets_nothing_changes_nothing(ranks, saved):
    for found in ranks(2).run(load, SETUP, str(saved), {"only": ["p2", "layers.*"]}):
        assert "matches nothing" in found["what"] and found["got"] == "layers.*" and found["untouched"]


def test_pattern_may_meet_what_another_rank_holds(ranks, saved):
    """At three ranks of this model nobody holds a part of every parameter."""
    results = ranks(3).run(load, SETUP, str(saved), {"only": ["p4"]})
    held_by = [any(key.startswith("weight/p4[") for key in found["after"]) for found in results]
    assert any(held_by) and not all(held_by)
    assert all(found["report"].loaded == results[0]["report"].loaded != () for found in results)


def test_text_in_place_of_patterns_is_refused(saved):
    assert load(0, 1, Setup(), str(saved), {"only": "first.*"})["what"] == "not a list of patterns"
    assert load(0, 1, Setup(), str(saved), {"missing": "ignore"})["got"] == "ignore"


@pytest.mark.parametrize("world_size", [1, 2])
def test_missing_tensors_keep_their_values_when_asked(ranks, saved, world_size):
    larger = replace(SETUP, shapes=(*SETUP.shapes, (2,)))
    for found in ranks(world_size).run(load, larger, str(saved), {"missing": "keep"}):
        assert_loaded(found, saved, lambda _, name: name != "p6")
        assert found["report"].kept == (("p6", "exp_avg"), ("p6", "exp_avg_sq"), ("p6", "weight"))
        assert found["steps"] == 2
    for found in ranks(world_size).run(load, larger, str(saved), {}):
        assert "lacks tensors" in found["what"] and "3 missing" in found["got"] and found["untouched"]


def test_stored_tensors_without_a_place_are_reported(saved, caplog):
    smaller = replace(SETUP, shapes=SETUP.shapes[:3])
    with caplog.at_level(logging.WARNING, "raydz"):
        found = load(0, 1, smaller, str(saved), {})
    assert {name for name, _ in found["report"].unused} == {"first.p3", "p4"}
    assert "6 unused (first.p3 (exp_avg)" in caplog.text and str(saved) in caplog.text
    caplog.clear()
    with caplog.at_level(logging.WARNING, "raydz"):
        load(0, 1, SETUP, str(saved), {})
        load(0, 1, SETUP, str(saved), {"weights_only": True})
    assert caplog.text == "", "what was not asked for, or all matched, needs no warning"


# -- renamed parameters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize(
    "key_map",
    [
        {"regex": {"^": "body."}},
        {"exact": {name: f"body.{name}" for name in NAMES}, "regex": {"^(seen|table)$": r"body.\1"}},
    ],
)
def test_renamed_parameters_load_under_their_new_names(ranks, saved, world_size, key_map):
    stored = stored_tensors(only_checkpoint(saved))
    for found in ranks(world_size).run(load, SETUP, str(saved), {"key_map": key_map}, True):
        assert_loaded(found, saved, lambda *_: True, rename=lambda name: name.removeprefix("body."))
        report = found["report"]
        assert report.renamed == {f"body.{name}": name for name in (*NAMES, "seen", "table")}
        assert set(report.loaded) == {(f"body.{name}", kind) for kind, name in stored}
        assert (report.kept, report.unused, report.idle_rules, found["steps"]) == ((), (), (), 2)


def test_plain_pairs_are_exact_names_and_idle_rules_are_named(saved, caplog):
    with caplog.at_level(logging.WARNING, "raydz"):
        found = load(0, 1, Setup(), str(saved), {"key_map": {"p0": "p0", "p9": "p0.weight"}})
    assert found["report"].idle_rules == ("p9",) and found["report"].renamed == {}
    assert "met nothing: p9" in caplog.text


def test_names_may_change_places(tmp_path):
    """Two parameters of one shape; a rename one after the other would lose one."""
    setup = Setup(shapes=((4, 2), (3,), (4, 2)))
    train_and_save(0, 1, setup, str(tmp_path), 1)
    found = load(0, 1, setup, str(tmp_path), {"key_map": {"p0": "p2", "p2": "p0"}})
    swap = {"p0": "p2", "p2": "p0"}
    assert_loaded(found, tmp_path, lambda *_: True, rename=lambda name: swap.get(name, name))


@pytest.mark.parametrize("key_map", [{"p0": "p2"}, {"regex": {r"p\d": "p2"}}, {"p0": "new", "p2": "new"}])
def test_two_names_onto_one_change_nothing(ranks, saved, key_map):
    for found in ranks(2).run(load, SETUP, str(saved), {"key_map": key_map}):
        assert "makes two stored tensors one" in found["what"] and found["untouched"]


@pytest.mark.parametrize(
    "given",
    [
        ["p0"], "p0", {"p0": 1}, {"exact": {"p0": None}}, {"regex": {"(": "x"}}, {"regex": {"p": r"\1"}},
        {"exact": {}, "regex": ["p"]},
    ],
)  # fmt: skip
def test_what_is_no_key_map_is_refused(given):
    with pytest.raises(ConfigError) as caught:
        KeyMap.of(given)
    assert caught.value.where == "key_map"


def test_key_map_from_a_file(tmp_path):
    path = tmp_path / "names.json"
    path.write_text(json.dumps({"regex": {r"^h\.(\d+)\.": r"layers.\1."}, "exact": {"h.0.w": "first"}}))
    key_map = KeyMap.from_file(path)
    assert [key_map.rename(name)[0] for name in ("h.0.w", "h.12.w", "wte")] == ["first", "layers.12.w", "wte"]
    assert KeyMap.of(key_map.as_dict()) == key_map
    for text in ("{", "[]"):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            KeyMap.from_file(path)
        assert caught.value.where == str(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        KeyMap.from_file(tmp_path / "none.json")


# -- what is read, by whom --------------------------------------------------------------------------------------------


def load_counting(rank, world_size, setup, uri):
    """Load, and count what goes over this rank's store: [(file name, bytes)], independent of the loader's own count."""
    reads: list[tuple[str, int]] = []
    gets: list[str] = []
    usual_read, usual_get = LocalStore.read_into, LocalStore.get

    def read_into(self, key, start, out, **keywords):
        reads.append((Path(key).name, len(out)))
        return usual_read(self, key, start, out, **keywords)

    def get(self, key, *arguments, **keywords):
        gets.append(Path(key).name)
        return usual_get(self, key, *arguments, **keywords)

    engine = build(setup)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalStore, "read_into", read_into)
        patch.setattr(LocalStore, "get", get)
        patch.setattr(load_plan, "READ_BYTES", 4 * CHUNK)
        engine.load_checkpoint(uri)
    found = {"reads": reads, "gets": gets, "state": {k: v.float().numpy() for k, v in held(engine).items()}}
    found["reported"] = engine.load_report.bytes_read
    engine.destroy()
    return found


LARGE = ((70, 60), (7,), (101, 7))


@pytest.mark.parametrize(
    ("world_size", "stage", "shard_size"), [(2, 0, None), (3, 0, None), (4, 3, 2), (4, 2, 1), (2, 3, None)]
)
def test_what_ranks_hold_alike_is_read_once(ranks, tmp_path, world_size, stage, shard_size):
    saved, setup = tmp_path, Setup(stage, LARGE, shard_size)
    ranks(2).run(train_and_save, replace(SETUP, shapes=LARGE), str(saved), 1)
    results = ranks(world_size).run(load_counting, setup, str(saved))
    total = sum(count for found in results for _, count in found["reads"])
    assert total == sum(found["reported"] for found in results)
    needed = sum(piece.high - piece.low for piece in stored_pieces(saved))
    # Whole chunks: a shard's two borders may each take a chunk more, in each of two files and of three reads.
    assert needed <= total <= needed + 12 * world_size * CHUNK < 1.5 * needed
    alone = load_counting(0, 1, Setup(shapes=LARGE), str(saved))
    for found in results:
        assert found["reads"], "the reads are spread over the ranks"
        assert_same_bits(found["state"], {key: part_of(alone["state"], key) for key in found["state"]})


def part_of(whole: dict, key: str):
    kind, (name, start, stop) = key.partition("/")[0], split_key(key)
    (values,) = (v for k, v in whole.items() if k.startswith(f"{kind}/{name}["))
    return values[start:stop]


def test_manifest_is_read_by_one_rank(ranks, saved):
    results = ranks(3).run(load_counting, SETUP, str(saved))
    assert [found["gets"].count("manifest.json") for found in results] == [1, 0, 0]


@pytest.mark.parametrize(
    ("world_size", "setup"), [(2, Setup(stage=0)), (3, Setup(stage=0)), (4, Setup(stage=3, shard_size=2))]
)
@pytest.mark.parametrize("position", ["first", "last"])
def test_damage_that_one_rank_meets_ends_the_load_on_all(ranks, saved, tmp_path, world_size, setup, position):
    import shutil

    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    path = data_files(copy)[1]
    data = bytearray(path.read_bytes())
    index = len(data) - 1 if position == "last" else min(p.low for p in stored_pieces(copy) if p.file == path)
    data[index] ^= 1
    path.write_bytes(data)
    results = ranks(world_size).run(load, setup, str(copy), {})
    assert all("checksum" in found["what"] for found in results)
    assert {found["where"] for found in results} == {results[0]["where"]}
    assert results[0]["where"].endswith(f"{path.name}, chunk {index // CHUNK}")


def test_reads_are_parallel_and_bounded(tmp_path, monkeypatch):
    setup = Setup(shapes=LARGE)
    train_and_save(0, 1, setup, str(tmp_path), 1)
    monkeypatch.setattr(load_plan, "READ_BYTES", CHUNK)
    in_flight, most, sizes, lock = 0, 0, set(), threading.Lock()
    usual, gathered = LocalStore.read_into, threading.Barrier(reader.READS_AT_ONCE)
    began = []

    def read_into(self, key, start, out, **keywords):
        nonlocal in_flight, most
        with lock:
            in_flight += 1
            most = max(most, in_flight)
            sizes.add(len(out))
            began.append(key)
            is_early = len(began) <= reader.READS_AT_ONCE
        if is_early:
            gathered.wait(20)  # breaks unless so many reads are in flight at once
        usual(self, key, start, out, **keywords)
        with lock:
            in_flight -= 1

    monkeypatch.setattr(LocalStore, "read_into", read_into)
    engine = build(setup)
    engine.load_checkpoint(tmp_path)
    engine.destroy()
    assert most == reader.READS_AT_ONCE < len(began)
    assert max(sizes) <= CHUNK


def test_file_that_is_replaced_while_it_is_read_is_noticed(saved, tmp_path, monkeypatch):
    import shutil

    from raydz.checkpoint.reader import CheckpointReader

    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    usual = CheckpointReader.check_there

    def check_and_replace(self, indices):
        usual(self, indices)
        path = data_files(copy)[0]
        shutil.copy(path, copy / "twin")
        (copy / "twin").rename(path)

    monkeypatch.setattr(CheckpointReader, "check_there", check_and_replace)
    engine = build(Setup())
    with pytest.raises(Exception, match="was replaced") as caught:
        engine.load_checkpoint(copy)
    assert isinstance(caught.value, ObjectChanged) or caught.value.where.endswith(".safetensors")
    engine.destroy()

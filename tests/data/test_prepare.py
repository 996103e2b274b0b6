"""From sources to folders: split, idempotence, races, refusals. Texts are got back through the tokenizer."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest

from raydz.data.packing import PackedRows
from raydz.data.prepare import HELDOUT, open_prepared, prepare
from raydz.data.source import SourceSpec
from raydz.data.tokenizer import TokenizerSpec, train_tokenizer
from raydz.data.tokens import TokenStream
from raydz.errors import ConfigError, DataError

# The package exports the function under the same name.
prepare_module = importlib.import_module("raydz.data.prepare")

SPEC = TokenizerSpec(vocab_size=300)
TEXTS = [f"document {i} says {'la ' * (i % 7)}{i * i}" for i in range(300)]


@pytest.fixture
def source(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("".join(text + "\n" for text in TEXTS))
    return SourceSpec(str(tmp_path / "in"))


def texts_of(prepared, folder):
    stream, tokenizer = TokenStream(folder), prepared.tokenizer()
    starts = [*stream.document_starts(0, len(stream)), len(stream)]
    pairs = itertools.pairwise(starts)
    return [tokenizer.decode(stream.tokens(int(a), int(b) - 1), skip_special=False) for a, b in pairs]


def test_held_out_documents_are_disjoint_and_none_is_lost(source, tmp_path):
    prepared = prepare([source], {}, 0.1, SPEC, None, tmp_path / "cache")
    train, heldout = texts_of(prepared, prepared.train_dir), texts_of(prepared, prepared.eval_dirs[HELDOUT])
    assert sorted(train + heldout) == sorted(TEXTS)
    assert 10 <= len(heldout) <= 55  # 30 expected, standard deviation 5.2
    assert [text for text in TEXTS if text in set(train)] == train


def test_equal_texts_are_on_the_same_side(tmp_path):
    (tmp_path / "a.txt").write_text("".join(text + "\n" for text in TEXTS * 3))
    prepared = prepare([SourceSpec(str(tmp_path / "a.txt"))], {}, 0.2, SPEC, None, tmp_path / "cache")
    assert not set(texts_of(prepared, prepared.train_dir)) & set(texts_of(prepared, prepared.eval_dirs[HELDOUT]))


def test_at_least_one_document_is_held_out_and_the_same_one_each_time(source, tmp_path):
    held = []
    for name in ("one", "two"):
        prepared = prepare([source], {}, 1e-9, SPEC, None, tmp_path / name)
        held.append(texts_of(prepared, prepared.eval_dirs[HELDOUT]))
        assert prepared.num_train_documents == len(TEXTS) - 1
    assert len(held[0]) == 1 and held[0] == held[1]


def test_fraction_zero_holds_nothing_out_and_named_sets_are_kept_whole(source, tmp_path):
    (tmp_path / "dev.jsonl").write_text('{"body": "first"}\n{"body": "second"}\n')
    evals = {"dev": [SourceSpec(str(tmp_path / "dev.jsonl"), column="body")]}
    prepared = prepare([source], evals, 0, SPEC, None, tmp_path / "cache")
    assert list(prepared.eval_dirs) == ["dev"]
    assert texts_of(prepared, prepared.eval_dirs["dev"]) == ["first", "second"]
    assert prepared.num_train_documents == len(TEXTS)


def test_tokenizer_never_sees_what_is_held_out(tmp_path):
    prepared = prepare([SourceSpec("sample:wordnet")], {}, 0.5, SPEC, None, tmp_path / "cache")
    expected = train_tokenizer(texts_of(prepared, prepared.train_dir), SPEC)
    assert prepared.tokenizer_sha256 == expected.sha256


def test_second_call_reads_only_the_cache_and_a_change_makes_another(source, tmp_path, monkeypatch):
    def call(fraction=0.1, spec=SPEC):
        return prepare([source], {}, fraction, spec, None, tmp_path / "cache")

    first = call()
    with monkeypatch.context() as patch:
        patch.setattr(prepare_module, "_build", lambda *a: pytest.fail("built again"))
        assert call() == first
    folders = {first.folder, call(0.2).folder, call(spec=TokenizerSpec(vocab_size=301)).folder}
    os.utime(tmp_path / "in" / "a.txt", ns=(1, 1))
    assert len(folders | {call().folder}) == 4


def test_a_given_tokenizer_is_used_and_must_fit_the_model_cached_or_not(source, tmp_path):
    tokenizer = train_tokenizer(TEXTS, TokenizerSpec(vocab_size=320))
    tokenizer.save(tmp_path / "tokenizer.json")
    spec = TokenizerSpec(path=str(tmp_path / "tokenizer.json"))
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"model\.vocab_size"):
            prepare([source], {}, 0.1, spec, 319, tmp_path / "cache")
        prepared = prepare([source], {}, 0.1, spec, 320, tmp_path / "cache")
    assert prepared.tokenizer_path.read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert prepared.tokenizer_sha256 == tokenizer.sha256


def test_racing_processes_make_one_folder(source, tmp_path):
    code = (
        "import sys; from raydz.data import *;"
        "print(prepare([SourceSpec(sys.argv[1])], {}, 0.1, TokenizerSpec(vocab_size=300), None, sys.argv[2]).folder)"
    )
    command = [sys.executable, "-c", code, source.path, str(tmp_path / "cache")]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    folders = {process.communicate(timeout=120)[0].strip() for process in processes}
    assert all(process.returncode == 0 for process in processes) and len(folders) == 1
    assert open_prepared(folders.pop()).num_train_tokens > 0
    assert [p.name for p in (tmp_path / "cache").iterdir() if "." not in p.name] == [
        open_prepared(next((tmp_path / "cache").glob("[0-9a-f]*"))).fingerprint[:24]
    ]


def test_a_source_that_grows_while_it_is_read_is_refused(source, tmp_path, monkeypatch):
    build = prepare_module._build

    def build_and_grow(*arguments):
        build(*arguments)
        with open(tmp_path / "in" / "a.txt", "a") as file:
            file.write("one more\n")

    monkeypatch.setattr(prepare_module, "_build", build_and_grow)
    with pytest.raises(DataError, match="changed while it was read"):
        prepare([source], {}, 0.1, SPEC, None, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[0-9a-f]*"))


def test_a_bad_line_leaves_no_cache(source, tmp_path):
    with open(tmp_path / "in" / "a.txt", "ab") as file:
        file.write(b"\xff\n")
    with pytest.raises(DataError, match="line 301"):
        prepare([source], {}, 0.1, SPEC, None, tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("[0-9a-f]*"))


def test_a_single_document_cannot_be_split(tmp_path):
    (tmp_path / "a.txt").write_text("only one")
    with pytest.raises(DataError, match="left to train on"):
        prepare([SourceSpec(str(tmp_path / "a.txt"))], {}, 0.1, SPEC, None, tmp_path / "cache")


@pytest.mark.parametrize(
    ("evals", "fraction", "where"),
    [({}, 1.0, "eval_fraction"), ({}, -0.1, "eval_fraction"), ({"../up": 1}, 0, "up"), ({HELDOUT: 1}, 0.1, HELDOUT)],
)
def test_impossible_arguments_are_refused(source, tmp_path, evals, fraction, where):
    with pytest.raises(ConfigError, match=where):
        prepare([source], {name: [source] for name in evals}, fraction, SPEC, None, tmp_path / "cache")
    with pytest.raises(ConfigError, match="no training source"):
        prepare([], {}, 0, SPEC, None, tmp_path / "cache")


def test_a_damaged_folder_is_named(source, tmp_path):
    prepared = prepare([source], {}, 0.1, SPEC, None, tmp_path / "cache")
    assert open_prepared(prepared.folder) == prepared
    (prepared.folder / "prepared.json").write_text(json.dumps({}))
    with pytest.raises(DataError, match="remove the folder"):
        open_prepared(prepared.folder)


def test_the_sample_becomes_rows_whose_labels_are_all_its_targets(tmp_path):
    prepared = prepare([SourceSpec("sample:wordnet")], {}, 0.02, TokenizerSpec(vocab_size=2048), 2048, tmp_path)
    rows = PackedRows(prepared.train_dir, 128)
    expected = prepared.num_train_tokens - prepared.num_train_documents
    assert rows.num_valid_tokens(np.arange(len(rows))).sum() == expected
    assert 4 < prepared.unigram_entropy < np.log(2048)
    assert prepared.num_train_tokens > 400_000

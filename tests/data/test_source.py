"""Documents and records, from every format; the oracle is the list that was written."""

from __future__ import annotations

import bz2
import gzip
import json
import tracemalloc

import pyarrow as pa
import pytest
from pyarrow import ipc
from pyarrow import parquet as pq

from raydz.data.source import SourceSpec, iter_documents, iter_records, source_fingerprint
from raydz.errors import ConfigError, DataError

TEXTS = ["one", "zwei  Wörter", "three 🙂", 'quote " and \\ slash', "tab\tinside"]


def write(path, texts=TEXTS, column="text"):
    table = pa.table({column: texts, "number": list(range(len(texts)))})
    kind = path.name.split(".", 1)[1]
    if kind == "parquet":
        pq.write_table(table, path, row_group_size=2)
    elif kind == "stream.arrow":
        with ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    elif kind == "arrow":
        with ipc.new_file(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    else:
        lines = [json.dumps({column: t, "number": i}) for i, t in enumerate(texts)] if "json" in kind else texts
        data = "".join(line + "\n" for line in lines).encode()
        path.write_bytes({"gz": gzip.compress, "bz2": bz2.compress}.get(kind.split(".")[-1], bytes)(data))
    return path


def documents(path, **options):
    return list(iter_documents(SourceSpec(str(path), **options)))


def failure(path, **options):
    with pytest.raises(DataError) as caught:
        documents(path, **options)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["a.txt", "a.txt.gz", "a.jsonl", "a.json", "a.jsonl.bz2", "a.parquet", "a.arrow", "a.stream.arrow"]
)
def test_every_format_gives_the_documents_in_order(tmp_path, name):
    assert documents(write(tmp_path / name)) == TEXTS


def test_a_folder_may_mix_formats(tmp_path):
    write(tmp_path / "b.parquet", ["from parquet"])
    write(tmp_path / "a.txt", ["from text"])
    write(tmp_path / "c.jsonl", ["from json"])
    assert documents(tmp_path) == ["from text", "from parquet", "from json"]


def test_text_can_be_split_by_line_by_blank_line_or_not_at_all(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbfone\r\ntwo\r\n\r\n  \nthree")
    assert documents(path) == ["one", "two", "three"]
    assert documents(path, split="blank_lines") == ["one\ntwo", "three"]
    assert documents(path, split="file") == ["one\ntwo\n\n  \nthree"]


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_the_column_can_be_chosen_and_a_missing_one_is_named(tmp_path, name):
    path = write(tmp_path / name, column="body")
    assert documents(path, column="body") == TEXTS
    message = failure(path)
    assert "'text' is missing" in message and "body" in message and name in message


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet", "a.arrow"])
def test_a_value_that_is_not_text_is_named_with_its_row(tmp_path, name):
    path = write(tmp_path / name, [*TEXTS, None])
    assert "row 6" in failure(path) and "NoneType" in failure(path)
    assert "int" in failure(path, column="number")


@pytest.mark.parametrize("line", ['{"text": "a"', "[1, 2]", '"text"', "nonsense"])
def test_a_line_that_is_no_json_object_is_named(tmp_path, line):
    path = tmp_path / "a.jsonl"
    path.write_text(f'{{"text": "fine"}}\n\n{line}\n')
    assert "a.jsonl, line 3" in failure(path)


def test_half_a_surrogate_pair_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "\\ud83d"}\n')
    assert "row 1" in failure(tmp_path)


def test_invalid_utf8_in_text_names_line_and_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"fine\nab\xff\n")
    message = failure(tmp_path)
    assert "line 2" in message and "0xff at column 3" in message


def test_invalid_utf8_in_parquet_names_the_row(tmp_path):
    bad = pa.array([b"fine", b"\xff"], pa.binary()).view(pa.string())
    pq.write_table(pa.table({"text": bad}), tmp_path / "a.parquet")
    assert "a.parquet, row 2" in failure(tmp_path)


@pytest.mark.parametrize("name", ["a.txt.gz", "a.parquet", "a.arrow"])
def test_a_truncated_file_is_named(tmp_path, name):
    path = write(tmp_path / name, ["some words here"] * 1000)
    path.write_bytes(path.read_bytes()[:-30])
    assert name in failure(path)


def test_a_file_of_blank_lines_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("\n \n")
    assert "no document" in failure(tmp_path)


def test_records_carry_several_columns(tmp_path):
    pairs = [{"prompt": "p", "chosen": [{"role": "user"}], "rejected": None}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(pair | {"other": 1}) + "\n" for pair in pairs))
    source = SourceSpec(str(tmp_path))
    assert list(iter_records(source, ["prompt", "chosen", "rejected"])) == pairs
    with pytest.raises(DataError, match="'messages' is missing"):
        list(iter_records(source, ["prompt", "messages"]))


def test_records_of_a_text_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="no columns"):
        list(iter_records(SourceSpec(str(write(tmp_path / "a.txt"))), ["prompt", "chosen"]))


def test_unknown_split_is_refused():
    with pytest.raises(ConfigError, match="blank_lines"):
        SourceSpec("a.txt", split="words")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_memory_is_bounded_by_a_batch_not_by_the_file(tmp_path, name):
    path = write(tmp_path / name, ["x" * 1000] * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in iter_documents(SourceSpec(str(path)))) == 20_000
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < path.stat().st_size / 4


def test_fingerprint_follows_options_and_content(tmp_path):
    path = write(tmp_path / "a.txt")
    first = source_fingerprint(SourceSpec(str(path)))
    assert source_fingerprint(SourceSpec(str(path))) == first
    assert source_fingerprint(SourceSpec(str(path), split="file")) != first
    path.write_text("longer than it was before, by far: " * 10)
    assert source_fingerprint(SourceSpec(str(path))) != first


def test_the_sample_is_a_mix_that_covers_the_alphabet():
    texts = documents("sample:wordnet")
    kinds = {kind: sum(f"({kind}): " in text for text in texts) for kind in ("noun", "verb", "adjective", "adverb")}
    assert len(texts) == sum(kinds.values()) and min(kinds.values()) > 400
    assert {text[0].lower() for text in texts} >= set("abcdefghijklmnopqrstuvwxyz")
    assert len(set(texts)) == len(texts)

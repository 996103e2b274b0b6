"""Row numbers, which errors show, count as a person would in an editor."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from raydz.data.files import list_files
from raydz.data.readers import read_rows


def numbers(path, split="lines"):
    (file,) = list_files(str(path))
    return [(number, row["text"]) for number, row in read_rows(file, ["text"], split)]


@pytest.mark.parametrize(
    ("split", "expected"),
    [
        ("lines", [(1, "a"), (2, "b"), (3, ""), (4, "c")]),
        ("blank_lines", [(1, "a\nb"), (4, "c")]),
        ("file", [(1, "a\nb\n\nc")]),
    ],
)
def test_text_is_numbered_by_the_first_line_of_each_document(tmp_path, split, expected):
    (tmp_path / "a.txt").write_text("a\nb\n\nc\n")
    assert numbers(tmp_path / "a.txt", split) == expected


def test_json_lines_are_numbered_with_blank_lines_counted(tmp_path):
    (tmp_path / "a.jsonl").write_text('\n{"text": "a"}\n\n{"text": "b"}')
    assert numbers(tmp_path / "a.jsonl") == [(2, "a"), (4, "b")]


def test_rows_are_numbered_on_over_batches_and_row_groups(tmp_path):
    texts = [str(i) for i in range(1, 3001)]
    pq.write_table(pa.table({"text": texts}), tmp_path / "a.parquet", row_group_size=700)
    assert numbers(tmp_path / "a.parquet") == [(i, str(i)) for i in range(1, 3001)]

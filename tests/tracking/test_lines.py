from __future__ import annotations

import json
import math
import resource
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.errors import StorageError
from raydz.tracking.lines import LineFile, read_lines


@contextmanager
def largest_file_bytes(limit: int):
    """A disk that is full: the kernel writes up to the limit and then refuses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_numbers_that_json_lacks_come_back(tmp_path):
    file = LineFile(tmp_path / "f.jsonl")
    file.append({"a": math.inf, "b": {"c": [-math.inf, 1.5]}, "d": "text"})
    file.append({"a": math.nan})
    file.close()
    first, second = read_lines(tmp_path / "f.jsonl")
    assert first == {"a": math.inf, "b": {"c": [-math.inf, 1.5]}, "d": "text"}
    assert math.isnan(second["a"])
    raw = (tmp_path / "f.jsonl").read_text().splitlines()
    strict = [json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON")) for line in raw]
    assert strict[0]["a"] == "inf" and strict[1]["a"] == "nan"


@settings(max_examples=60, deadline=None)
@given(cut=st.integers(0, 10_000), num_lines=st.integers(0, 4), size=st.integers(0, 200))
def test_a_file_torn_at_any_byte_goes_on_with_its_complete_lines(tmp_path_factory, cut, num_lines, size):
    path = tmp_path_factory.mktemp("torn") / "f.jsonl"
    whole = b"".join(json.dumps({"n": n, "pad": "x" * size}).encode() + b"\n" for n in range(num_lines))
    torn = whole[: cut % (len(whole) + 1)]
    path.write_bytes(torn)
    file = LineFile(path)
    file.append({"n": "next"})
    file.close()
    assert [record["n"] for record in read_lines(path)] == [*range(torn.count(b"\n")), "next"]


def test_a_torn_tail_longer_than_a_block_is_cut(tmp_path):
    path = tmp_path / "f.jsonl"
    path.write_bytes(b'{"n":1}\n' + b"x" * 200_000)
    LineFile(path).close()
    assert path.read_bytes() == b'{"n":1}\n'


def test_a_full_disk_leaves_no_half_line_and_the_next_try_succeeds(tmp_path):
    file = LineFile(tmp_path / "f.jsonl")
    file.append({"n": 1})
    with largest_file_bytes(12), pytest.raises(StorageError) as caught:
        file.append({"n": 2})
    assert str(tmp_path / "f.jsonl") in str(caught.value)
    assert (tmp_path / "f.jsonl").read_bytes() == b'{"n":1}\n'
    file.append({"n": 2})
    file.close()
    assert [record["n"] for record in read_lines(tmp_path / "f.jsonl")] == [1, 2]


def test_a_place_that_cannot_hold_a_folder_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="file/sub"):
        LineFile(tmp_path / "file" / "sub" / "f.jsonl")


def test_threads_append_whole_lines(tmp_path):
    file = LineFile(tmp_path / "lines.jsonl")
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda number: file.append({"number": number, "text": "x" * 500}), range(400)))
    file.close()
    found = [json.loads(line)["number"] for line in (tmp_path / "lines.jsonl").read_text().splitlines()]
    assert sorted(found) == list(range(400))
    assert file._size == (tmp_path / "lines.jsonl").stat().st_size  # what a failed write is cut back to

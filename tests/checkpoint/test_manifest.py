"""The manifest: what is written is read back, and nothing that does not cover its tensors passes."""

from __future__ import annotations

import base64
import hashlib
import json
import struct
import tracemalloc
import zlib
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.checkpoint import DataFile, Manifest, Piece, TensorEntry
from raydz.errors import CheckpointError

NAMES = st.text(min_size=1, max_size=12)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


def manifest_of(pieces, shape=(4, 3), dtype="F32", file_bytes=4096, state=None, **fields) -> Manifest:
    entry = TensorEntry("w", "weight", dtype, shape, tuple(Piece(*piece) for piece in pieces))
    files = (DataFile("a/rank-0", file_bytes, 4 << 20, (1, 2**32 - 1), 7),)
    defaults = {"step": 5, "world_size": 1, "attempt": "abcd", "created": 1.5, "raydz_version": "9.9"}
    return Manifest(files=files, tensors={("w", "weight"): entry}, state=state or {}, **defaults | fields)


WHOLE = manifest_of([(0, 5, 0, 0), (5, 12, 0, 100)])


@given(
    cuts=st.lists(st.integers(1, 23), unique=True).map(sorted),
    names=st.tuples(NAMES, NAMES),
    state=st.dictionaries(st.text(max_size=5), JSON, max_size=3),
    step=st.integers(0, 10**10 - 1),
)
def test_what_is_written_is_read_back(cuts, names, state, step):
    borders = [0, *cuts, 24]
    pieces = [(low, high, 0, 8 * low) for low, high in pairwise(borders)]
    manifest = manifest_of(pieces, shape=(24,), dtype="I64", state=state, step=step, aliases={names[0]: names[1]})
    assert Manifest.from_bytes(manifest.to_bytes(), "here") == manifest


def test_state_with_numbers_as_keys_is_read_back_as_json_has_it():
    state = {"client": {2: "b", 10: "a", 1: (1, 2)}}
    again = Manifest.from_bytes(manifest_of([(0, 12, 0, 0)], state=state).to_bytes(), "here")
    assert again.state == {"client": {"2": "b", "10": "a", "1": [1, 2]}}


def test_digest_is_the_sha256_of_the_canonical_body():
    outer = json.loads(WHOLE.to_bytes())
    text = json.dumps(outer["body"], sort_keys=True, separators=(",", ":"))
    assert outer["sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert outer["body"]["format_version"] == 2
    assert outer["body"]["tensors"] == [["w", "weight", "F32", [4, 3], 2]]


def test_columns_are_what_the_format_says():
    body = json.loads(WHOLE.to_bytes())["body"]
    assert struct.unpack("<2I", base64.b64decode(body["files"][0]["chunk_crcs"])) == (1, 2**32 - 1)
    steps = {
        name: list(struct.unpack("<2q", zlib.decompress(base64.b64decode(column))))
        for name, column in body["pieces"].items()
    }
    assert steps == {"start": [0, 5], "stop": [5, 7], "file": [0, 0], "offset": [0, 100]}


def signed(body: dict) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return json.dumps({"sha256": hashlib.sha256(text.encode()).hexdigest(), "body": body}).encode()


def test_format_1_is_read_as_the_same_manifest():
    body = json.loads(WHOLE.to_bytes())["body"] | {"format_version": 1}
    del body["pieces"]
    body["tensors"] = [["w", "weight", "F32", [4, 3], [[0, 5, 0, 0], [5, 12, 0, 100]]]]
    body["files"] = [body["files"][0] | {"chunk_crcs": [1, 2**32 - 1]}]
    assert Manifest.from_bytes(signed(body), "here") == WHOLE


@pytest.mark.parametrize("column", ["", "no base64!", base64.b64encode(b"not deflated").decode(), None, 7])
def test_column_that_cannot_be_read_is_an_error(column):
    body = json.loads(WHOLE.to_bytes())["body"]
    body["pieces"]["stop"] = column
    with pytest.raises(CheckpointError, match="column"):
        Manifest.from_bytes(signed(body), "here")


def test_column_never_takes_more_memory_than_its_integers():
    body = json.loads(WHOLE.to_bytes())["body"]
    body["pieces"]["stop"] = base64.b64encode(zlib.compress(bytes(1 << 26))).decode()
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="column"):
        Manifest.from_bytes(signed(body), "here")
    assert tracemalloc.get_traced_memory()[1] < 1 << 22
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("pieces", "match"),
    [
        ([(0, 5, 0, 0), (6, 12, 0, 100)], "a gap"),
        ([(1, 12, 0, 0)], "a gap"),
        ([(0, 6, 0, 0), (5, 12, 0, 100)], "an overlap"),
        ([(0, 12, 0, 0), (12, 3, 0, 48), (3, 12, 0, 12)], "an overlap"),
        ([(0, 5, 0, 0)], "not whole"),
        ([], "not whole"),
        ([(0, 13, 0, 0)], "not whole"),
        ([(0, 12, 0, 4096 - 47)], "outside its file"),
        ([(0, 12, 1, 0)], "outside its file"),
        ([(0, 12, -1, 0)], "outside its file"),
        ([(0, 12, 0, -4)], "outside its file"),
    ],
)
def test_tensor_that_is_not_covered_once_is_refused(pieces, match):
    with pytest.raises(CheckpointError, match=match) as caught:
        Manifest.from_bytes(manifest_of(pieces).to_bytes(), "s3://b/run/step-5")
    assert "s3://b/run/step-5: w" in caught.value.where


def test_piece_may_end_where_its_file_does():
    Manifest.from_bytes(manifest_of([(0, 12, 0, 4096 - 48)]).to_bytes(), "here")


@given(position=st.integers(0, len(WHOLE.to_bytes()) - 1), change=st.integers(1, 255))
def test_any_changed_byte_is_noticed_or_means_the_same(position, change):
    data = bytearray(WHOLE.to_bytes())
    data[position] ^= change
    try:
        again = Manifest.from_bytes(bytes(data), "here")
    except CheckpointError as error:
        assert error.where == "here"
    else:
        assert again == WHOLE  # white space


@pytest.mark.parametrize("cut", [0, 1, 20, 100, -2])
def test_truncated_manifest_is_refused(cut):
    with pytest.raises(CheckpointError, match="not a checkpoint manifest"):
        Manifest.from_bytes(WHOLE.to_bytes()[:cut], "here")


@pytest.mark.parametrize("data", [b"[]", b"{}", b"7", b'{"body": 3, "sha256": ""}', b"\xff\xfe", b"\x80\x04pickle"])
def test_other_files_are_no_manifest(data):
    with pytest.raises(CheckpointError, match="not a checkpoint manifest"):
        Manifest.from_bytes(data, "here")


@pytest.mark.parametrize("version", [0, 3, "1", None, True])
def test_unknown_version_is_named(version):
    outer = json.loads(WHOLE.to_bytes())
    outer["body"]["format_version"] = version
    with pytest.raises(CheckpointError, match="another format") as caught:
        Manifest.from_bytes(json.dumps(outer).encode(), "here")
    assert (caught.value.got, caught.value.wanted) == (version, "1 or 2")


def test_tied_names_find_the_stored_tensor():
    manifest = manifest_of([(0, 12, 0, 0)], aliases={"head": "w"})
    assert manifest.entry(["head"], "weight").name == "w"
    assert manifest.entry(["other", "w"], "weight").name == "w"
    assert manifest.entry(["head"], "exp_avg") is None

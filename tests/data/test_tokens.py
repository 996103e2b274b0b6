"""The stream over shards, and what it refuses; the oracle is the list of documents that was written."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.data.token_writer import TokenWriter
from raydz.data.tokens import TokenIndex, TokenStream
from raydz.errors import DataError

INDEX = TokenIndex(vocab_size=50, eos_id=0, pad_id=1, tokenizer_sha256="t", source_fingerprint="s")


def write(folder, documents, shard_tokens=1 << 20, index=INDEX, **options):
    writer = TokenWriter(folder, index, shard_tokens=shard_tokens, **options)
    for document in documents:
        writer.add([np.array(document, dtype=np.int64)])
    return writer.finish()


documents_strategy = st.lists(st.lists(st.integers(2, 49), max_size=7), min_size=1, max_size=12)


@settings(max_examples=60, deadline=None)
@given(documents=documents_strategy, shard_tokens=st.integers(1, 20))
def test_stream_is_all_documents_with_eos_whatever_the_shards(tmp_path_factory, documents, shard_tokens):
    folder = tmp_path_factory.mktemp("tokens")
    index = write(folder, documents, shard_tokens)
    expected = [token for document in documents for token in [*document, 0]]
    starts = [sum(len(d) + 1 for d in documents[:i]) for i in range(len(documents))]
    stream = TokenStream(folder)
    assert (len(stream), index.num_documents) == (len(expected), len(documents))
    for start in range(len(expected) + 1):
        for stop in range(start, len(expected) + 3):
            assert stream.tokens(start, stop).tolist() == expected[start:stop]
            assert stream.document_starts(start, stop).tolist() == [s for s in starts if start <= s < stop]
    positions = np.arange(len(expected) + 3)
    assert stream.starts_before(positions).tolist() == [sum(s < p for s in starts) for p in positions]


def test_reading_copies_nothing(tmp_path):
    write(tmp_path, [[5, 6, 7, 8]])
    piece = TokenStream(tmp_path).tokens(1, 3)
    assert not piece.flags.owndata and not piece.flags.writeable


def test_truncated_missing_or_swapped_shards_are_named(tmp_path):
    write(tmp_path, [[5] * 30, [6] * 40], shard_tokens=1)
    first, second = (tmp_path / f"shard-0000{i}.arrow" for i in range(2))
    whole = first.read_bytes()
    first.write_bytes(whole[:-1])
    with pytest.raises(DataError, match=r"shard-00000(.|\n)*bytes"):
        TokenStream(tmp_path)
    first.write_bytes(second.read_bytes().ljust(len(whole), b"\0"))
    with pytest.raises(DataError, match="shard-00000"):
        TokenStream(tmp_path)
    os.remove(first)
    with pytest.raises(DataError, match="shard-00000"):
        TokenStream(tmp_path)


def test_a_missing_damaged_or_newer_index_is_named(tmp_path):
    with pytest.raises(DataError, match="no index"):
        TokenStream(tmp_path)
    write(tmp_path, [[5]])
    path = tmp_path / "index.json"
    fields = json.loads(path.read_text())
    path.write_text(json.dumps(fields | {"format_version": 2}))
    with pytest.raises(DataError, match="another format"):
        TokenStream(tmp_path)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(DataError, match=r"index\.json"):
        TokenStream(tmp_path)

"""What the writer leaves on disk, read without raydz; the oracle is the list of documents."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import ipc

from raydz.data.token_writer import TokenWriter, entropy
from raydz.data.tokens import TokenIndex, TokenStream, token_dtype
from raydz.errors import DataError

INDEX = TokenIndex(vocab_size=50, eos_id=0, pad_id=1, tokenizer_sha256="t", source_fingerprint="s")


def write(folder, documents, shard_tokens=1 << 20, index=INDEX, **options):
    writer = TokenWriter(folder, index, shard_tokens=shard_tokens, **options)
    for document in documents:
        writer.add([np.array(document, dtype=np.int64)])
    return writer.finish()


documents_strategy = st.lists(st.lists(st.integers(2, 49), max_size=7), min_size=1, max_size=12)


def test_shards_are_plain_arrow_lists_of_the_smallest_dtype(tmp_path):
    write(tmp_path, [[5, 6], [], [7]])
    column = ipc.open_file(pa.memory_map(str(tmp_path / "shard-00000.arrow"))).read_all()["tokens"]
    assert column.type == pa.large_list(pa.uint16())
    assert column.to_pylist() == [[5, 6, 0], [0], [7, 0]]


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, "uint16"), (65_537, "uint32")])
def test_dtype_holds_the_largest_id(tmp_path, vocab_size, dtype):
    assert token_dtype(vocab_size) == dtype
    index = TokenIndex(vocab_size, eos_id=0, pad_id=1, tokenizer_sha256="t", source_fingerprint="s")
    assert write(tmp_path, [[vocab_size - 1]], index=index).dtype == dtype
    assert TokenStream(tmp_path).tokens(0, 2).tolist() == [vocab_size - 1, 0]


def test_vocabulary_larger_than_the_dtype_is_refused(tmp_path):
    index = TokenIndex(65_537, eos_id=0, pad_id=1, tokenizer_sha256="t", source_fingerprint="s")
    with pytest.raises(DataError, match="65537 ids in uint16"):
        TokenWriter(tmp_path, index, dtype=np.dtype(np.uint16))


def test_id_outside_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(DataError, match="outside the vocabulary"):
        write(tmp_path, [[50]])


def test_no_document_is_refused(tmp_path):
    with pytest.raises(DataError, match="no document"):
        write(tmp_path, [])


@settings(max_examples=40, deadline=None)
@given(documents=documents_strategy, shard_tokens=st.integers(1, 20))
def test_entropy_counts_each_next_token_target_once(tmp_path_factory, documents, shard_tokens):
    targets = Counter(token for document in documents for token in [*document, 0][1:])
    total = sum(targets.values())
    expected = -math.fsum(n / total * math.log(n / total) for n in targets.values())
    index = write(tmp_path_factory.mktemp("tokens"), documents, shard_tokens)
    assert index.unigram_entropy == pytest.approx(expected, abs=1e-12)


def test_entropy_of_equal_counts_is_the_logarithm():
    assert entropy(np.array([3, 0, 3, 3])) == pytest.approx(math.log(3))

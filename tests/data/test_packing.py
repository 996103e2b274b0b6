"""Packed rows against a loop over plain lists."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.data.packing import IGNORE, PackedRows
from raydz.data.token_writer import TokenWriter
from raydz.data.tokens import TokenIndex
from raydz.errors import ConfigError, DataError

EOS, PAD = 0, 1


def pack(folder, documents, length, shard_tokens=1 << 20):
    writer = TokenWriter(folder, TokenIndex(50, EOS, PAD, "t", "s"), shard_tokens=shard_tokens)
    writer.add([np.array(document, dtype=np.int64) for document in documents])
    writer.finish()
    return PackedRows(folder, length)


def plain_rows(documents, length):
    """The rule, word by word: (input, label, position, document) of each place of each row."""
    stream = [(t, d) for d, document in enumerate(documents) for t in [*document, EOS]]
    rows = []
    for first in range(0, len(stream) - 1, length):
        row, position, number = [], 0, 0
        for p in range(first, first + length):
            token, document = stream[p] if p < len(stream) else (PAD, None)
            previous = None if p == first else (stream[p - 1][1] if p - 1 < len(stream) else None)
            if p > first and document != previous:
                position, number = 0, number + 1
            has_next = p + 1 < len(stream) and stream[p + 1][1] == document
            row.append((token, stream[p + 1][0] if has_next else IGNORE, position, number))
            position += 1
        rows.append(row)
    return rows


packed = st.tuples(
    st.lists(st.lists(st.integers(2, 49), min_size=1, max_size=9), min_size=1, max_size=9),
    st.integers(1, 12),
    st.integers(1, 30),
)


@settings(max_examples=150, deadline=None)
@given(packed)
def test_rows_are_what_the_rule_says(tmp_path_factory, case):
    documents, length, shard_tokens = case
    rows = pack(tmp_path_factory.mktemp("tokens"), documents, length, shard_tokens)
    expected = np.array(plain_rows(documents, length))
    assert len(rows) == len(expected)
    batch = rows.rows(np.arange(len(rows)))
    for i, name in enumerate(["input_ids", "labels", "position_ids", "document_ids"]):
        assert batch[name].tolist() == expected[:, :, i].tolist(), name
    assert rows.num_valid_tokens(np.arange(len(rows))).tolist() == (expected[:, :, 1] != IGNORE).sum(1).tolist()


@settings(max_examples=80, deadline=None)
@given(packed)
def test_valid_labels_in_a_row_are_every_next_token_exactly_once(tmp_path_factory, case):
    documents, length, shard_tokens = case
    rows = pack(tmp_path_factory.mktemp("tokens"), documents, length, shard_tokens)
    labels = rows.rows(np.arange(len(rows)))["labels"].ravel()
    assert labels[labels != IGNORE].tolist() == [t for document in documents for t in [*document, EOS][1:]]


def test_any_order_and_repetition_of_rows_may_be_asked_for(tmp_path):
    rows = pack(tmp_path, [[2, 3, 4, 5], [6, 7], [8, 9, 10]], 4)
    whole = rows.rows(np.arange(3))
    some = rows.rows(np.array([2, 0, 2]))
    for name in whole:
        assert some[name].tolist() == whole[name][[2, 0, 2]].tolist()


def test_an_empty_micro_batch_has_the_right_shape(tmp_path):
    rows = pack(tmp_path, [[2, 3, 4]], 4)
    batch = rows.rows(np.empty(0, dtype=np.int64))
    assert {name: (array.shape, str(array.dtype)) for name, array in batch.items()} == {
        "input_ids": ((0, 4), "int64"),
        "labels": ((0, 4), "int64"),
        "position_ids": ((0, 4), "int64"),
        "document_ids": ((0, 4), "int32"),
    }
    assert rows.num_valid_tokens(np.empty(0, dtype=np.int64)).sum() == 0


def test_padding_is_a_document_of_its_own_without_labels(tmp_path):
    batch = pack(tmp_path, [[2, 3]], 5).rows(np.array([0]))
    assert batch["input_ids"].tolist() == [[2, 3, EOS, PAD, PAD]]
    assert batch["labels"].tolist() == [[3, EOS, IGNORE, IGNORE, IGNORE]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1]]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1]]


def test_rows_are_fresh_and_writable(tmp_path):
    rows = pack(tmp_path, [[2, 3, 4, 5]], 2)
    for array in rows.rows(np.array([0])).values():
        array += 1
    assert rows.rows(np.array([0]))["input_ids"].tolist() == [[2, 3]]


@pytest.mark.parametrize("index", [-1, 2])
def test_rows_outside_are_refused(tmp_path, index):
    with pytest.raises(DataError, match="0 to 1"):
        pack(tmp_path, [[2, 3, 4]], 2).rows(np.array([0, index]))


def test_nothing_to_predict_and_no_length_are_refused(tmp_path):
    with pytest.raises(DataError, match="no token to predict"):
        pack(tmp_path, [[]], 2)
    with pytest.raises(ConfigError):
        PackedRows(tmp_path, 0)

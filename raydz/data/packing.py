"""Rows of exactly T tokens, cut from the stream of documents; no label, position or attention crosses a document.

Layer 4, between tokens (the stream) and train/loop.py (which asks for the rows that order names). Row i takes tokens
i*T .. i*T+T-1 as input and looks one token further for its last label: see the note "How rows are cut" in README.md.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from raydz.data.tokens import TokenStream
from raydz.errors import ConfigError, DataError

IGNORE = -100
"""The label of a position that is not trained on (torch's cross-entropy skips it)."""

Batch = dict[str, np.ndarray]
"""`input_ids`, `labels`, `position_ids` int64 and `document_ids` int32, each (B, T)."""


class PackedRows:
    """Random access to packed rows; opening maps files and reads nothing, whatever their size.

    Args:
        tokens: a token folder, or one that is open.
        sequence_length: T.

    Raises:
        ConfigError: sequence_length below 1.
        DataError: the folder is damaged, or holds a single token, so that there is nothing to predict.
    """

    def __init__(self, tokens: TokenStream | Path | str, sequence_length: int) -> None:
        if sequence_length < 1:
            raise ConfigError(
                "rows must have a length", where="data.sequence_length", got=sequence_length, wanted=">= 1"
            )
        self.stream = tokens if isinstance(tokens, TokenStream) else TokenStream(tokens)
        self.sequence_length = sequence_length
        # The last token of the stream has no successor: a row that began there would have no label.
        self._num_inputs = len(self.stream) - 1
        if self._num_inputs < 1:
            raise DataError(
                "there is no token to predict", where=str(self.stream.folder), got=f"{len(self.stream)} token"
            )

    def __len__(self) -> int:
        return -(-self._num_inputs // self.sequence_length)

    def rows(self, indices: np.ndarray) -> Batch:
        """Read the rows at `indices`, which may be empty.

        `labels` are the next tokens, `IGNORE` where the next token is another document's. `document_ids` count from
        0 in each row; positions count from 0 at each document, and again where a row cuts one. The last row is
        filled with pad, which counts as a document of its own and carries no labels.

        Ownership: fresh arrays, the caller's.
        """
        length = self.sequence_length
        firsts = self._first_tokens(indices)
        tokens = np.full((len(firsts), length + 1), self.stream.index.pad_id, dtype=np.int64)
        begins = np.zeros((len(firsts), length + 1), dtype=bool)
        for row, first in enumerate(firsts.tolist()):
            piece = self.stream.tokens(first, first + length + 1)
            tokens[row, : len(piece)] = piece
            begins[row, len(piece) :][:1] = True
            begins[row, self.stream.document_starts(first, first + length + 1) - first] = True
        labels = np.where(begins[:, 1:], IGNORE, tokens[:, 1:])
        num_real = np.minimum(len(self.stream) - firsts, length + 1)
        labels[np.arange(1, length + 1) >= num_real[:, None]] = IGNORE
        begins[:, 0] = True
        column = np.arange(length)
        last_begin = np.maximum.accumulate(np.where(begins[:, :-1], column, 0), axis=1)
        return {
            "input_ids": np.ascontiguousarray(tokens[:, :-1]),
            "labels": labels,
            "position_ids": column - last_begin,
            "document_ids": np.cumsum(begins[:, :-1], axis=1, dtype=np.int32) - np.int32(1),
        }

    def num_valid_tokens(self, indices: np.ndarray) -> np.ndarray:
        """How many labels of each row are trained on, without reading a token.

        Every rank can so count the whole batch by itself and divide its loss by the same number.

        Shape: (len(indices),); sum it for a batch. Dtype: int64.
        """
        firsts = self._first_tokens(indices)
        lasts = np.minimum(firsts + self.sequence_length, self._num_inputs)
        num_crossings = self.stream.starts_before(lasts + 1) - self.stream.starts_before(firsts + 1)
        return lasts - firsts - num_crossings

    def _first_tokens(self, indices: np.ndarray) -> np.ndarray:
        indices = np.asarray(indices, dtype=np.int64)
        if len(indices) and not (indices.min() >= 0 and indices.max() < len(self)):
            got = f"{indices.min()} to {indices.max()}"
            raise DataError("no such row", where=str(self.stream.folder), got=got, wanted=f"0 to {len(self) - 1}")
        return indices * self.sequence_length

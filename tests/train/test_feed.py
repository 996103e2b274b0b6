"""What a micro-batch looks like, by the rows alone."""

from __future__ import annotations

import numpy as np
import torch

from raydz.train.feed import to_tensors


class Rows:
    """Three rows of four: two whole documents, and one row of two."""

    documents = np.array([[0, 0, 0, 0], [0, 0, 1, 1], [3, 3, 3, 3]], dtype=np.int32)

    def rows(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        ids = np.tile(np.arange(4), (3, 1))[indices]
        return {
            "input_ids": ids, "labels": ids + 1, "position_ids": ids, "document_ids": self.documents[indices],
        }  # fmt: skip


def batch(*indices: int):
    return to_tensors(Rows(), np.array(indices, dtype=np.int64), torch.device("cpu"))


def test_documents_are_left_out_only_where_every_row_is_one():
    assert batch(0)["document_ids"] is None and batch(2, 0)["document_ids"] is None
    assert batch(0, 1)["document_ids"].tolist() == [[0, 0, 0, 0], [0, 0, 1, 1]]
    assert list(batch(0)) == list(batch(1)) == ["input_ids", "labels", "position_ids", "document_ids"]


def test_no_rows_become_one_without_labels():
    empty = batch()
    assert empty["input_ids"].shape == (1, 4) and empty["labels"].eq(-100).all() and empty["document_ids"] is None

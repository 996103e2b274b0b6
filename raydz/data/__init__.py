"""Text to tokens to packed rows: everything between a path and the arrays that a training step reads.

Layer 4. Output is numpy; the only folder that imports pyarrow. README.md is the manual.
"""

from __future__ import annotations

from raydz.data.order import BatchOrder, split
from raydz.data.packing import IGNORE, Batch, PackedRows
from raydz.data.prepare import HELDOUT, PreparedData, open_prepared, prepare
from raydz.data.source import SourceSpec, iter_documents, iter_records
from raydz.data.tokenizer import Tokenizer, TokenizerSpec, check_vocab, load_tokenizer, train_tokenizer

__all__ = [
    "HELDOUT",
    "IGNORE",
    "Batch",
    "BatchOrder",
    "PackedRows",
    "PreparedData",
    "SourceSpec",
    "Tokenizer",
    "TokenizerSpec",
    "check_vocab",
    "iter_documents",
    "iter_records",
    "load_tokenizer",
    "open_prepared",
    "prepare",
    "split",
    "train_tokenizer",
]

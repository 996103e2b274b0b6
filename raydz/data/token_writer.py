"""Write token shards and their index, shard by shard, in bounded memory.

Layer 4, between tokenizer (ids) and tokens (the format, and the reader). prepare publishes the finished folder.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from raydz.data.tokens import INDEX_NAME, Shard, TokenIndex, token_dtype
from raydz.errors import DataError

_SHARD_TOKENS = 1 << 26


class TokenWriter:
    """Write documents into `folder` (which exists and is empty); `finish` writes the index, last.

    Args:
        folder: becomes a token folder. Publish it by a rename when `finish` has returned.
        index: the fields that the writer cannot know; counts and shards are filled in.
        dtype: of the ids; default `token_dtype(index.vocab_size)`.
        shard_tokens: a shard is closed when it holds that many, which bounds the writer's memory.

    Raises:
        DataError: the vocabulary does not fit into `dtype`.
    """

    def __init__(
        self, folder: Path, index: TokenIndex, dtype: np.dtype | None = None, shard_tokens: int = _SHARD_TOKENS
    ) -> None:
        self._dtype = np.dtype(dtype) if dtype is not None else token_dtype(index.vocab_size)
        if index.vocab_size - 1 > np.iinfo(self._dtype).max:
            largest = np.iinfo(self._dtype).max + 1
            raise DataError(
                "the vocabulary does not fit into the token dtype",
                where=str(folder),
                got=f"{index.vocab_size} ids in {self._dtype}",
                wanted=f"at most {largest}",
                remedy="use uint32",
            )
        self._folder, self._index, self._shard_tokens = folder, index, shard_tokens
        self._pieces: list[np.ndarray] = []
        self._lengths: list[int] = []
        self._num_pending = 0
        self._shards: list[Shard] = []
        self._target_counts = np.zeros(index.vocab_size, dtype=np.int64)

    @property
    def num_documents(self) -> int:
        """Documents added so far."""
        return sum(shard.num_documents for shard in self._shards) + len(self._lengths)

    def add(self, documents: Sequence[np.ndarray]) -> None:
        """Append documents (ids without eos).

        Raises:
            DataError: an id is not below the vocabulary's size.
        """
        for ids in documents:
            if len(ids) and int(ids.max()) >= self._index.vocab_size:
                raise DataError(
                    "a token id is outside the vocabulary", got=int(ids.max()), wanted=self._index.vocab_size
                )
            self._pieces.append(np.append(ids, self._index.eos_id).astype(self._dtype))
            self._lengths.append(len(ids) + 1)
            self._num_pending += len(ids) + 1
            if self._num_pending >= self._shard_tokens:
                self._flush()

    def finish(self) -> TokenIndex:
        """Write what is left and the index.

        Raises:
            DataError: no document was added.
        """
        self._flush()
        if not self._shards:
            raise DataError("there is no document to write", where=str(self._folder))
        index = replace(
            self._index,
            dtype=str(self._dtype),
            num_tokens=sum(shard.num_tokens for shard in self._shards),
            num_documents=self.num_documents,
            unigram_entropy=entropy(self._target_counts),
            shards=tuple(self._shards),
        )
        (self._folder / INDEX_NAME).write_text(json.dumps(asdict(index), indent=1) + "\n")
        return index

    def _flush(self) -> None:
        if not self._lengths:
            return
        stream = np.concatenate(self._pieces)
        offsets = np.concatenate([[0], np.cumsum(self._lengths)])
        # A document's first token is nobody's target: labels never cross documents.
        is_target = np.ones(len(stream), dtype=bool)
        is_target[offsets[:-1]] = False
        self._target_counts += np.bincount(stream[is_target], minlength=self._index.vocab_size)
        name = f"shard-{len(self._shards):05d}.arrow"
        column = pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), pa.array(stream))
        batch = pa.record_batch([column], names=["tokens"])
        with open(self._folder / name, "wb") as file, ipc.new_file(file, batch.schema) as writer:
            writer.write_batch(batch)
        num_bytes = os.path.getsize(self._folder / name)
        self._shards.append(Shard(name, len(stream), len(self._lengths), num_bytes))
        self._pieces, self._lengths, self._num_pending = [], [], 0


def entropy(counts: np.ndarray) -> float:
    """Nats per token of the distribution that `counts` describe; 0.0 where nothing was counted."""
    total = counts.sum()
    if total == 0:
        return 0.0
    shares = counts[counts > 0] / total
    return float(-(shares * np.log(shares)).sum())

"""Token shards: Arrow IPC files with one list of ids a document, memory-mapped, and an `index.json` beside them.

Layer 4, between token_writer (which makes them) and packing (rows). Each list ends with eos, so the lists of a
shard laid end to end, which is how Arrow stores them, are the stream that packing cuts into rows: nothing is copied.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import ipc

from raydz.errors import DataError

FORMAT_VERSION = 1
INDEX_NAME = "index.json"


@dataclass(frozen=True)
class Shard:
    """One file of the stream. `num_bytes` shows a truncated copy before anything reads it."""

    file: str
    num_tokens: int
    num_documents: int
    num_bytes: int


@dataclass(frozen=True)
class TokenIndex:
    """What `index.json` says. `unigram_entropy` is in nats per token, over all next-token targets."""

    vocab_size: int
    eos_id: int
    pad_id: int
    tokenizer_sha256: str
    source_fingerprint: str
    dtype: str = ""
    num_tokens: int = 0
    num_documents: int = 0
    unigram_entropy: float = 0.0
    shards: tuple[Shard, ...] = ()
    format_version: int = FORMAT_VERSION


def token_dtype(vocab_size: int) -> np.dtype:
    """The smallest dtype that holds every id: uint16 up to 65,536 ids, else uint32."""
    return np.dtype(np.uint16 if vocab_size <= 1 << 16 else np.uint32)


class TokenStream:
    """All tokens of a folder as one sequence, memory-mapped.

    Ownership: `tokens` may return a view of the mapping, which is read-only and lives as long as it is referenced.

    Raises:
        DataError: no index, another format version, a shard missing, truncated or not as the index says.
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = Path(folder)
        self.index = read_index(self.folder)
        self._tokens: list[np.ndarray] = []
        self._starts: list[np.ndarray] = []
        for shard in self.index.shards:
            tokens, starts = _map_shard(self.folder / shard.file, shard, self.index.dtype)
            self._tokens.append(tokens)
            self._starts.append(starts)
        # Entry i is what lies before shard i; the last entry is the total.
        self._token_base = np.cumsum([0] + [shard.num_tokens for shard in self.index.shards])
        self._document_base = np.cumsum([0] + [shard.num_documents for shard in self.index.shards])

    def __len__(self) -> int:
        return self.index.num_tokens

    def tokens(self, start: int, stop: int) -> np.ndarray:
        """Tokens `start` to `stop` of the stream, clipped to its end.

        Shape: (min(stop, len) - start,). Dtype: the index's.
        """
        pieces = [
            self._tokens[i][max(0, start - self._token_base[i]) : stop - self._token_base[i]]
            for i in self._shards_between(start, stop)
        ]
        return pieces[0] if len(pieces) == 1 else np.concatenate([*pieces, np.empty(0, self.index.dtype)])

    def document_starts(self, start: int, stop: int) -> np.ndarray:
        """Positions p with start <= p < stop at which a document begins.

        Shape: (number of such documents,). Dtype: int64.
        """
        pieces = [np.empty(0, np.int64)]
        for i in self._shards_between(start, stop):
            base = self._token_base[i]
            first, last = np.searchsorted(self._starts[i], [start - base, stop - base])
            pieces.append(self._starts[i][first:last] + base)
        return np.concatenate(pieces)

    def starts_before(self, positions: np.ndarray) -> np.ndarray:
        """How many documents begin before each position, without reading a token.

        Shape: as `positions`. Dtype: int64.
        """
        clipped = np.minimum(np.asarray(positions, dtype=np.int64), len(self))
        shards = np.searchsorted(self._token_base[1:-1], clipped, side="left")
        counts = np.empty_like(clipped)
        for i in np.unique(shards):
            here = shards == i
            counts[here] = np.searchsorted(self._starts[i], clipped[here] - self._token_base[i])
            counts[here] += self._document_base[i]
        return counts

    def _shards_between(self, start: int, stop: int) -> range:
        first = int(np.searchsorted(self._token_base[1:], start, side="right"))
        last = int(np.searchsorted(self._token_base[:-1], stop, side="left"))
        return range(first, last)


def read_index(folder: Path) -> TokenIndex:
    """Read `index.json`.

    Raises:
        DataError: missing, not an index, or of another format version.
    """
    path = folder / INDEX_NAME
    try:
        fields: dict[str, Any] = json.loads(path.read_text())
        version = fields["format_version"]
        if version == FORMAT_VERSION:
            shards = tuple(Shard(**shard) for shard in fields.pop("shards"))
            return TokenIndex(**fields, shards=shards)
    except FileNotFoundError as error:
        remedy = "prepare the data with jobs/prepare_data.py"
        raise DataError("not a folder of tokens: it has no index", where=str(path), remedy=remedy) from error
    except (ValueError, KeyError, TypeError, OSError) as error:
        raise DataError("the index of the tokens cannot be read", where=str(path), got=repr(error)) from error
    raise DataError("the tokens have another format", where=str(path), got=version, wanted=FORMAT_VERSION)


def _map_shard(path: Path, shard: Shard, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    remedy = "remove the folder and prepare the data again"
    try:
        num_bytes = os.path.getsize(path)
        if num_bytes != shard.num_bytes:
            raise DataError(
                "the shard is not as the index says",
                where=str(path),
                got=f"{num_bytes} bytes",
                wanted=f"{shard.num_bytes} bytes",
                remedy=remedy,
            )
        batch = ipc.open_file(pa.memory_map(str(path))).get_batch(0)
    except (OSError, pa.ArrowException) as error:
        raise DataError("the shard cannot be read", where=str(path), got=str(error), remedy=remedy) from error
    column = batch.column(0)
    tokens = column.values.to_numpy(zero_copy_only=True)
    starts = column.offsets.to_numpy(zero_copy_only=True)[:-1]
    if (str(tokens.dtype), len(tokens), len(starts)) != (dtype, shard.num_tokens, shard.num_documents):
        got = f"{len(tokens)} tokens of {tokens.dtype} in {len(starts)} documents"
        raise DataError("the shard is not as the index says", where=str(path), got=got, remedy=remedy)
    return tokens, starts

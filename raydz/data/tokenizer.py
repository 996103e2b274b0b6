"""Text to token ids and back: a byte-level BPE, trained here or read from a `tokenizer.json`.

Layer 4, between source (texts) and token_writer (shards of ids). Generation decodes with the same `Tokenizer`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from raydz.errors import ConfigError, DataError

_SMALLEST_VOCABULARY = 256 + 2
"""All bytes, eos and pad."""


@dataclass(frozen=True)
class TokenizerSpec:
    """Which tokenizer to use.

    Args:
        path: a `tokenizer.json` or a folder that holds one; None trains a tokenizer on the training documents.
        vocab_size: of the trained tokenizer at most (little text gives less); not read when `path` is given.
        eos: the token after each document; must exist in the file.
        pad: fills the last row; a file without it uses eos, which is safe because padding carries no labels.
        train_chars: how much text the training of the tokenizer reads at most, from the first document on.
    """

    path: str | None = None
    vocab_size: int = 2048
    eos: str = "<|endoftext|>"
    pad: str = "<|pad|>"
    train_chars: int = 1 << 28

    def __post_init__(self) -> None:
        if self.path is None and self.vocab_size < _SMALLEST_VOCABULARY:
            raise ConfigError(
                "the vocabulary is too small for a byte-level tokenizer",
                where="data.tokenizer.vocab_size",
                got=self.vocab_size,
                wanted=f"at least {_SMALLEST_VOCABULARY}: 256 bytes, eos and pad",
            )


class Tokenizer:
    """A loaded tokenizer. Decoding an encoding gives the text back, byte for byte, when it is byte-level.

    Attributes:
        json_text: the `tokenizer.json`; `sha256` is of exactly these bytes.
        vocab_size: the largest id + 1, which is what an embedding must hold (ids may have holes).
    """

    def __init__(self, json_text: str, spec: TokenizerSpec, where: str) -> None:
        try:
            self._backend = tokenizers.Tokenizer.from_str(json_text)
        except Exception as error:  # the library raises plain Exception
            raise DataError("not a tokenizer.json", where=where, got=str(error)[:200]) from error
        # Files exported for inference often carry both, and would cut or fill every document silently.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.json_text = json_text
        self.sha256 = hashlib.sha256(json_text.encode()).hexdigest()
        self.vocab_size = max(self._backend.get_vocab(with_added_tokens=True).values()) + 1
        self.eos_id = self._special_id(spec.eos, where)
        pad_id = self._backend.token_to_id(spec.pad)
        self.pad_id = self.eos_id if pad_id is None else pad_id

    def encode_batch(self, texts: Sequence[str], *, parse_special: bool = False) -> list[np.ndarray]:
        """Ids of each text, without eos.

        `parse_special=False` reads `<|endoftext|>` inside a document as the characters that it is made of, so that
        no text can forge a document's end; templates for chat want True.

        Shape: one (n,) a text. Dtype: int64. Blocking: uses all cores of the process.
        """
        self._backend.encode_special_tokens = not parse_special
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(encoding.ids, dtype=np.int64) for encoding in encodings]

    def encode(self, text: str, *, parse_special: bool = False) -> np.ndarray:
        """`encode_batch` of one text."""
        return self.encode_batch([text], parse_special=parse_special)[0]

    def decode(self, ids: Sequence[int] | np.ndarray, *, skip_special: bool = True) -> str:
        """The text of `ids`; bytes that are not UTF-8 come out as U+FFFD."""
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        """The id of one token, or None."""
        return self._backend.token_to_id(token)

    def save(self, path: Path) -> None:
        """Write `tokenizer.json`."""
        path.write_bytes(self.json_text.encode())

    def _special_id(self, token: str, where: str) -> int:
        token_id = self._backend.token_to_id(token)
        if token_id is not None:
            return token_id
        special = [t.content for t in self._backend.get_added_tokens_decoder().values() if t.special]
        raise ConfigError(
            "the tokenizer has no such end-of-document token",
            where=where,
            got=token,
            wanted=f"one of its special tokens: {', '.join(special[:12]) or 'it has none'}",
            remedy="set data.tokenizer.eos",
        )


def load_tokenizer(spec: TokenizerSpec) -> Tokenizer:
    """Read the tokenizer at `spec.path`, a file or a folder with `tokenizer.json`.

    Raises:
        ConfigError: no such file, or it lacks `spec.eos`.
        DataError: the file is not a tokenizer.
    """
    if spec.path is None:
        raise ConfigError("no tokenizer path is given", where="data.tokenizer.path")
    path = Path(spec.path).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        text = file.read_bytes().decode()
    except OSError as error:
        raise ConfigError(
            "the tokenizer cannot be read",
            where=str(file),
            got=error.strerror,
            wanted="a local tokenizer.json, or a folder that holds one",
        ) from error
    except UnicodeDecodeError as error:
        raise DataError("not a tokenizer.json", where=str(file), got="bytes that are not UTF-8") from error
    return Tokenizer(text, spec, str(file))


def train_tokenizer(documents: Iterable[str], spec: TokenizerSpec) -> Tokenizer:
    """Train a byte-level BPE: the same documents in the same order give the same bytes of `tokenizer.json`.

    Blocking: uses all cores of the process.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=spec.vocab_size,
        special_tokens=[spec.eos, spec.pad],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(_first_chars(documents, spec.train_chars), trainer)
    return Tokenizer(backend.to_str(), spec, "the trained tokenizer")


def check_vocab(tokenizer: Tokenizer, vocab_size: int) -> None:
    """Refuse a tokenizer that makes ids which the model's embedding lacks.

    Raises:
        ConfigError: the tokenizer's largest id + 1 exceeds `vocab_size`.
    """
    if tokenizer.vocab_size > vocab_size:
        raise ConfigError(
            "the tokenizer's vocabulary does not fit into the model's",
            where="model.vocab_size",
            got=vocab_size,
            wanted=f"at least {tokenizer.vocab_size}",
            remedy=f"set model.vocab_size to {tokenizer.vocab_size} or more, or choose another tokenizer",
        )


def chunked(documents: Iterable[str], max_documents: int = 1024, max_chars: int = 1 << 22) -> Iterator[list[str]]:
    """Group documents for `encode_batch`, so that short ones share a call and long ones don't fill the memory."""
    chunk: list[str] = []
    num_chars = 0
    for text in documents:
        chunk.append(text)
        num_chars += len(text)
        if len(chunk) >= max_documents or num_chars >= max_chars:
            yield chunk
            chunk, num_chars = [], 0
    if chunk:
        yield chunk


def _first_chars(documents: Iterable[str], max_chars: int) -> Iterator[str]:
    for text in documents:
        yield text
        max_chars -= len(text)
        if max_chars <= 0:
            return

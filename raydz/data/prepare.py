"""Sources to token folders, once: train or load the tokenizer, hold documents out, tokenise, publish.

Layer 4, the end of the path files -> readers -> source -> tokenizer -> token_writer. Called by train/loop.py on every
node (equal input gives an equal folder) and by jobs/prepare_data.py ahead of time.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import tokenizers

from raydz.data.cache import build_once
from raydz.data.source import SourceSpec, iter_documents, source_fingerprint
from raydz.data.token_writer import TokenWriter
from raydz.data.tokenizer import Tokenizer, TokenizerSpec, check_vocab, chunked, load_tokenizer, train_tokenizer
from raydz.data.tokens import FORMAT_VERSION, TokenIndex, read_index
from raydz.errors import ConfigError, DataError
from raydz.log import get

_log = get(__name__)

HELDOUT = "heldout"
"""Name of the evaluation set that is held out of the training documents."""

_SUMMARY = "prepared.json"
_TOKENIZER = "tokenizer.json"


@dataclass(frozen=True)
class PreparedData:
    """A finished folder. `unigram_entropy` (nats per token) is the loss of a model that knows only frequencies."""

    folder: Path
    train_dir: Path
    eval_dirs: dict[str, Path]
    tokenizer_path: Path
    tokenizer_sha256: str
    vocab_size: int
    eos_id: int
    pad_id: int
    unigram_entropy: float
    num_train_tokens: int
    num_train_documents: int
    fingerprint: str
    tokenizer_spec: TokenizerSpec = field(repr=False)

    def tokenizer(self) -> Tokenizer:
        """Load the tokenizer that made the ids."""
        return load_tokenizer(self.tokenizer_spec)


@dataclass(frozen=True)
class _Request:
    train: tuple[SourceSpec, ...]
    evals: dict[str, tuple[SourceSpec, ...]]
    eval_fraction: float
    tokenizer: TokenizerSpec
    vocab_size: int | None


def prepare(
    train: Sequence[SourceSpec],
    evals: Mapping[str, Sequence[SourceSpec]],
    eval_fraction: float,
    tokenizer: TokenizerSpec,
    vocab_size: int | None,
    cache_dir: Path | str,
) -> PreparedData:
    """Tokenise the sources into `cache_dir`, or find there that it was done before.

    Args:
        train: training sources, read in this order.
        evals: further evaluation sets by name.
        eval_fraction: share of the training documents that becomes the set `heldout`, at least one; 0 for none. A
            document's text decides, so that equal texts are all held out or all trained on.
        tokenizer: trained on the training documents unless it has a path.
        vocab_size: of the model, which the tokenizer must fit into; None if the model will follow the tokenizer.
        cache_dir: local folder; one subfolder per fingerprint of sources, options and tokenizer.

    Blocking: for as long as the text takes; any number of processes may call it at once.

    Raises:
        ConfigError: impossible arguments, or the tokenizer does not fit the model.
        DataError: a source is missing, empty, damaged, or changes meanwhile; too few documents to hold one out.
        StorageError: `cache_dir` cannot be written.
    """
    request = _Request(tuple(train), {k: tuple(v) for k, v in evals.items()}, eval_fraction, tokenizer, vocab_size)
    _check(request)
    fingerprint = _fingerprint(request)

    def build(folder: Path) -> None:
        _build(folder, request, fingerprint)
        if _fingerprint(request) != fingerprint:
            raise DataError("a source has changed while it was read", remedy="start again when it is complete")

    prepared = open_prepared(build_once(Path(cache_dir), fingerprint[:24], build))
    if vocab_size is not None:
        check_vocab(prepared.tokenizer(), vocab_size)
    return prepared


def open_prepared(folder: Path | str) -> PreparedData:
    """Open what `prepare` made.

    Raises:
        DataError: not such a folder, or damaged.
    """
    folder = Path(folder)
    try:
        summary = json.loads((folder / _SUMMARY).read_text())
        spec = TokenizerSpec(**summary["tokenizer"] | {"path": str(folder / _TOKENIZER)})
        evals: list[str] = summary["evals"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        remedy = "remove the folder and prepare the data again"
        raise DataError("not a folder of prepared data", where=str(folder), got=repr(error), remedy=remedy) from error
    index = read_index(folder / "train")
    return PreparedData(
        folder=folder,
        train_dir=folder / "train",
        eval_dirs={name: folder / "eval" / name for name in evals},
        tokenizer_path=folder / _TOKENIZER,
        tokenizer_sha256=index.tokenizer_sha256,
        vocab_size=index.vocab_size,
        eos_id=index.eos_id,
        pad_id=index.pad_id,
        unigram_entropy=index.unigram_entropy,
        num_train_tokens=index.num_tokens,
        num_train_documents=index.num_documents,
        fingerprint=index.source_fingerprint,
        tokenizer_spec=spec,
    )


def _check(request: _Request) -> None:
    if not request.train:
        raise ConfigError("there is no training source", where="data.sources")
    if not 0 <= request.eval_fraction < 1:
        where, wanted = "data.eval_fraction", "0 <= eval_fraction < 1"
        raise ConfigError(
            "impossible share of held-out documents", where=where, got=request.eval_fraction, wanted=wanted
        )
    for name, sources in request.evals.items():
        where = f"data.evals.{name}"
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name):
            wanted = "letters, digits, dot, dash and underscore"
            raise ConfigError("the evaluation set's name cannot be a folder's", where=where, got=name, wanted=wanted)
        if not sources:
            raise ConfigError("the evaluation set has no source", where=where)
    if request.eval_fraction > 0 and HELDOUT in request.evals:
        remedy = "give the set another name, or set data.eval_fraction to 0"
        raise ConfigError("the name is taken by the held-out documents", where=f"data.evals.{HELDOUT}", remedy=remedy)


def _fingerprint(request: _Request) -> str:
    spec = request.tokenizer
    chosen = load_tokenizer(spec).sha256 if spec.path else [spec.vocab_size, spec.train_chars, tokenizers.__version__]
    parts = [
        FORMAT_VERSION,
        [source_fingerprint(source) for source in request.train],
        {name: [source_fingerprint(source) for source in sources] for name, sources in sorted(request.evals.items())},
        request.eval_fraction,
        [chosen, spec.eos, spec.pad],
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _build(folder: Path, request: _Request, fingerprint: str) -> None:
    limit = _heldout_limit(_documents(request.train), request.eval_fraction)
    tokenizer = _make_tokenizer(request, limit)
    if request.vocab_size is not None:
        check_vocab(tokenizer, request.vocab_size)
    tokenizer.save(folder / _TOKENIZER)
    index = TokenIndex(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.pad_id, tokenizer.sha256, fingerprint)
    _write_training(folder, request, tokenizer, index, limit)
    for name, sources in request.evals.items():
        writer = _open_writer(folder / "eval" / name, index)
        for texts in chunked(_documents(sources)):
            writer.add(tokenizer.encode_batch(texts))
        writer.finish()
    names = [HELDOUT] * (limit > 0) + list(request.evals)
    summary = {"evals": names, "tokenizer": asdict(request.tokenizer)}
    (folder / _SUMMARY).write_text(json.dumps(summary, indent=1) + "\n")


def _write_training(folder: Path, request: _Request, tokenizer: Tokenizer, index: TokenIndex, limit: int) -> None:
    train = _open_writer(folder / "train", index)
    heldout = _open_writer(folder / "eval" / HELDOUT, index) if limit else None
    for texts in chunked(_documents(request.train)):
        encoded = tokenizer.encode_batch(texts)
        is_heldout = [_hash(text) < limit for text in texts]
        train.add([ids for ids, held in zip(encoded, is_heldout, strict=True) if not held])
        if heldout is not None:
            heldout.add([ids for ids, held in zip(encoded, is_heldout, strict=True) if held])
    if train.num_documents == 0:
        raise DataError(
            "no document is left to train on",
            where="data.sources",
            got=f"all of {heldout.num_documents if heldout else 0} held out",
            remedy="give more documents (for text see `split`), or lower data.eval_fraction",
        )
    done = train.finish()
    _log.info("tokenised %d training documents into %d tokens", done.num_documents, done.num_tokens)
    if heldout is not None:
        heldout.finish()


def _make_tokenizer(request: _Request, limit: int) -> Tokenizer:
    if request.tokenizer.path:
        return load_tokenizer(request.tokenizer)
    training = (text for text in _documents(request.train) if _hash(text) >= limit)
    return train_tokenizer(training, request.tokenizer)


def _open_writer(folder: Path, index: TokenIndex) -> TokenWriter:
    folder.mkdir(parents=True)
    return TokenWriter(folder, index)


def _documents(sources: Iterable[SourceSpec]) -> Iterator[str]:
    for source in sources:
        yield from iter_documents(source)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _heldout_limit(documents: Iterable[str], fraction: float) -> int:
    """Documents whose hash is below the limit are held out; the limit rises until there is one.

    Reads only as far as the first document below it, so a large source is not read twice.
    """
    if fraction == 0:
        return 0
    limit = max(1, int(fraction * 2.0**64))
    smallest = None
    for text in documents:
        value = _hash(text)
        if value < limit:
            return limit
        smallest = value if smallest is None else min(smallest, value)
    return limit if smallest is None else smallest + 1

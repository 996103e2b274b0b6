"""The tokenizer: exact round trips, the same bytes for the same text, refusals."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raydz.data.source import SourceSpec, iter_documents
from raydz.data.tokenizer import TokenizerSpec, check_vocab, chunked, load_tokenizer, train_tokenizer
from raydz.errors import ConfigError, DataError

SPEC = TokenizerSpec(vocab_size=400)


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(itertools.islice(iter_documents(SourceSpec("sample:wordnet")), 500), SPEC)


@settings(max_examples=100, deadline=None)
@given(text=st.text())
def test_round_trip_is_exact_for_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_uses_the_vocabulary_and_learns_to_merge(tokenizer):
    assert tokenizer.vocab_size == 400
    assert len(tokenizer.encode("a person who is not")) < len("a person who is not") / 1.5


def test_training_twice_gives_the_same_bytes_in_other_processes_too(tokenizer):
    code = (
        "import itertools; from raydz.data import *;"
        "docs = itertools.islice(iter_documents(SourceSpec('sample:wordnet')), 500);"
        "print(train_tokenizer(docs, TokenizerSpec(vocab_size=400)).sha256)"
    )
    for threads in ("1", "2"):
        environment = os.environ | {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
        assert out.stdout.strip() == tokenizer.sha256


def test_only_the_first_characters_are_read_for_training():
    def endless():
        while True:
            yield "some words to learn from "

    assert train_tokenizer(endless(), TokenizerSpec(vocab_size=300, train_chars=10_000)).vocab_size <= 300


def test_a_document_cannot_forge_its_end(tokenizer):
    assert tokenizer.eos_id not in tokenizer.encode("before <|endoftext|> after")
    assert tokenizer.eos_id in tokenizer.encode("before <|endoftext|> after", parse_special=True)
    assert tokenizer.decode(tokenizer.encode("before <|endoftext|> after")) == "before <|endoftext|> after"


def test_saved_and_loaded_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer.json")
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = load_tokenizer(TokenizerSpec(path=str(path)))
        assert (loaded.sha256, loaded.eos_id, loaded.pad_id) == (tokenizer.sha256, tokenizer.eos_id, tokenizer.pad_id)
        assert loaded.encode("same ids").tolist() == tokenizer.encode("same ids").tolist()
    assert loaded.sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()


def test_truncation_and_padding_of_a_file_are_not_applied(tokenizer, tmp_path):
    content = json.loads(tokenizer.json_text)
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    content["padding"] = {
        "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 1, "pad_type_id": 0, "pad_token": "<|pad|>",
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    loaded = load_tokenizer(TokenizerSpec(path=str(tmp_path)))
    for text in ("a", "a long text of many more than nine tokens, all of which are kept"):
        assert loaded.decode(loaded.encode(text), skip_special=False) == text


def test_a_file_without_pad_pads_with_eos_and_one_without_eos_is_refused(tokenizer, tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(tokenizer.json_text.replace("<|pad|>", "<|other|>"))
    loaded = load_tokenizer(TokenizerSpec(path=str(path)))
    assert loaded.pad_id == loaded.eos_id
    with pytest.raises(ConfigError, match=r"<\|other\|>"):
        load_tokenizer(TokenizerSpec(path=str(path), eos="</s>"))


def test_files_that_are_no_tokenizer_are_named(tmp_path):
    with pytest.raises(ConfigError, match="nowhere"):
        load_tokenizer(TokenizerSpec(path=str(tmp_path / "nowhere.json")))
    for content in (b"{}", b"not json", b"\xff"):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(DataError, match=r"tokenizer\.json"):
            load_tokenizer(TokenizerSpec(path=str(tmp_path)))


def test_vocabulary_larger_than_the_models_is_refused(tokenizer):
    check_vocab(tokenizer, 400)
    with pytest.raises(ConfigError, match=r"model\.vocab_size"):
        check_vocab(tokenizer, 399)


def test_vocabulary_below_all_bytes_is_refused():
    with pytest.raises(ConfigError, match="258"):
        TokenizerSpec(vocab_size=257)


def test_chunks_keep_all_documents_in_order_and_within_bounds():
    texts = ["x" * n for n in np.random.default_rng(0).integers(1, 50, 200)]
    chunks = list(chunked(texts, max_documents=7, max_chars=100))
    assert [text for chunk in chunks for text in chunk] == texts
    assert all(len(chunk) <= 7 and sum(map(len, chunk[:-1])) < 100 for chunk in chunks)

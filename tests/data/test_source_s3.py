"""Sources on a real S3 server; boto3 writes, raydz reads."""

from __future__ import annotations

import contextlib
import io
import time

import pyarrow as pa
import pytest
from pyarrow import parquet as pq

from raydz.data.prepare import prepare
from raydz.data.source import SourceSpec, iter_documents, source_fingerprint
from raydz.data.tokenizer import TokenizerSpec
from raydz.errors import DataError

pytestmark = pytest.mark.s3


def parquet_bytes(texts):
    sink = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), sink)
    return sink.getvalue()


@pytest.fixture(scope="module")
def bucket(s3_server):
    """One bucket for all: each takes volumes of the server, which has few."""
    bucket = s3_server.bucket()
    with contextlib.closing(s3_server.client()) as client:
        for key, body in {
            "corpus/b.parquet": parquet_bytes(["from", "parquet"]),
            "corpus/a.txt": "from text\nwith Wörter\n".encode(),
            "corpus/deep/c.jsonl": b'{"text": "from json"}\n',
            "corpus/_SUCCESS": b"",
            "other.txt": b"other\n",
        }.items():
            client.put_object(Bucket=bucket, Key=key, Body=body)
    return bucket


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("corpus/a.txt", ["from text", "with Wörter"]),
        ("corpus/", ["from text", "with Wörter", "from", "parquet", "from json"]),
        ("corpus/*.parquet", ["from", "parquet"]),
        ("**/*.jsonl", ["from json"]),
    ],
)
def test_file_folder_and_glob_are_read(s3_env, bucket, path, expected):
    source = SourceSpec(f"s3://{bucket}/{path}", endpoint_url=s3_env.endpoint_url)
    assert list(iter_documents(source)) == expected


def test_fingerprint_changes_when_an_object_does(s3_env, bucket):
    source = SourceSpec(f"s3://{bucket}/other.txt", endpoint_url=s3_env.endpoint_url)
    before = source_fingerprint(source)
    assert source_fingerprint(source) == before
    with contextlib.closing(s3_env.client()) as client:
        client.put_object(Bucket=bucket, Key="other.txt", Body=b"now another length\n")
    assert source_fingerprint(source) != before


def test_text_on_s3_is_prepared_into_a_local_cache(s3_env, bucket, tmp_path):
    source = SourceSpec(f"s3://{bucket}/corpus", endpoint_url=s3_env.endpoint_url)
    prepared = prepare([source], {}, 0, TokenizerSpec(vocab_size=258), None, tmp_path)
    assert prepared.num_train_documents == 5


@pytest.mark.parametrize("path", ["corpus/nowhere.txt", "corpus/no*.txt"])
def test_missing_object_is_named(s3_env, bucket, path):
    with pytest.raises(DataError, match=r"nowhere|no\*"):
        list(iter_documents(SourceSpec(f"s3://{bucket}/{path}", endpoint_url=s3_env.endpoint_url)))


def test_missing_bucket_is_named(s3_env):
    with pytest.raises(DataError, match="no-such-bucket"):
        list(iter_documents(SourceSpec("s3://no-such-bucket/a.txt", endpoint_url=s3_env.endpoint_url)))


def test_wrong_secret_and_dead_endpoint_end_soon_with_the_remedy(s3_env, bucket, monkeypatch):
    began = time.monotonic()
    with pytest.raises(DataError, match="endpoint"):
        list(iter_documents(SourceSpec(f"s3://{bucket}/corpus", endpoint_url="http://127.0.0.1:1")))
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
    with pytest.raises(DataError, match="credentials") as caught:
        list(iter_documents(SourceSpec(f"s3://{bucket}/corpus", endpoint_url=s3_env.endpoint_url)))
    assert "wrong" not in str(caught.value) and time.monotonic() - began < 30

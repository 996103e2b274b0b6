"""The same on a real S3 server: two ranks save, three load, and the manifest is put once."""

from __future__ import annotations

import contextlib
import os

import pytest

from raydz.checkpoint import open_checkpoint
from raydz.errors import CheckpointError, StorageError
from raydz.storage import S3Options, open_store
from tests.checkpoint.states import Setup, assert_same_bits, build, load_and_save, stored_tensors, train, train_and_save

pytestmark = pytest.mark.s3
SETUP = Setup(stage=3)


@pytest.fixture(scope="module")
def bucket(s3_server):
    return s3_server.bucket()


def with_environment(rank, world_size, env, function, *args):
    """Ranks are processes of the session; the server's credentials reach them here."""
    os.environ.update(env)
    try:
        return function(rank, world_size, *args)
    finally:
        for name in env:
            del os.environ[name]


def download(server, bucket, prefix, folder):
    """Plain boto3 fetches what lies under the prefix."""
    with contextlib.closing(server.client()) as client:
        listed = client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]
        for entry in listed:
            target = folder / entry["Key"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())
    return [entry["Key"] for entry in listed]


def test_two_ranks_save_and_three_load(ranks, s3_env, bucket, tmp_path):
    uri, options = f"s3://{bucket}/reshard", S3Options(endpoint_url=s3_env.endpoint_url)
    saved = ranks(2).run(with_environment, s3_env.env, train_and_save, SETUP, uri, 2, options)
    again = tmp_path / "again"
    loaded = ranks(3).run(with_environment, s3_env.env, load_and_save, Setup(stage=1), uri, str(again), options)
    keys = download(s3_env, bucket, "reshard", tmp_path / "copy")
    assert keys[-1] == "reshard/step-0000000002/manifest.json" and len(keys) == 3
    tensors = stored_tensors(tmp_path / "copy")
    assert_same_bits(stored_tensors(again), tensors)
    assert_same_bits(loaded[0]["weights"], saved[0]["weights"])


def test_manifest_is_put_under_a_condition(s3_env, bucket):
    uri, options = f"s3://{bucket}/conditional", S3Options(endpoint_url=s3_env.endpoint_url)
    with contextlib.closing(s3_env.client()) as client:
        client.put_object(Bucket=bucket, Key="conditional/a/manifest.json", Body=b"someone else's")
    engine = build(SETUP)
    with pytest.raises(CheckpointError, match="not saved"):
        engine.save_checkpoint(uri, tag="a", options=options)
    with contextlib.closing(s3_env.client()) as client:
        body = client.get_object(Bucket=bucket, Key="conditional/a/manifest.json")["Body"].read()
    assert body == b"someone else's"
    engine.destroy()


def test_loser_of_two_attempts_removes_its_objects(s3_env, bucket):
    uri, options = f"s3://{bucket}/race", S3Options(endpoint_url=s3_env.endpoint_url)
    engines = [build(SETUP), build(SETUP)]
    for engine in engines:
        train(engine, 1, 1)
        engine.save_checkpoint(uri, options=options)
        engine.destroy()
    store = open_store(uri, options)
    folder, manifest = open_checkpoint(store)
    assert sorted(store.list()) == sorted([f"{folder}/manifest.json", f"{folder}/{manifest.files[0].path}"])


def test_missing_and_damaged_objects_are_named(s3_env, bucket):
    uri, options = f"s3://{bucket}/damage", S3Options(endpoint_url=s3_env.endpoint_url)
    engine = build(SETUP)
    engine.save_checkpoint(uri, options=options)
    store = open_store(uri, options)
    folder, manifest = open_checkpoint(store)
    key = f"{folder}/{manifest.files[0].path}"
    data = bytearray(store.get(key))
    data[-1] ^= 4
    store.put(key, bytes(data))
    with pytest.raises(CheckpointError, match="checksum") as caught:
        engine.load_checkpoint(uri, options=options)
    assert caught.value.where == f"{uri}/{folder}: {manifest.files[0].path}, chunk 0"
    store.delete([key])
    with pytest.raises(CheckpointError, match="missing"):
        engine.load_checkpoint(uri, options=options)
    with pytest.raises(CheckpointError, match="no committed checkpoint"):
        engine.load_checkpoint(f"s3://{bucket}/nowhere", options=options)
    engine.destroy()


def test_object_that_is_replaced_while_it_is_read_is_noticed(s3_env, bucket, monkeypatch):
    """The condition of the ranged reads tells it, before any checksum does."""
    from raydz.checkpoint.reader import CheckpointReader

    uri, options = f"s3://{bucket}/replaced", S3Options(endpoint_url=s3_env.endpoint_url)
    engine = build(SETUP)
    engine.save_checkpoint(uri, options=options)
    store = open_store(uri, options)
    folder, manifest = open_checkpoint(store)
    key, usual = f"{folder}/{manifest.files[0].path}", CheckpointReader.check_there

    def check_and_replace(self, indices):
        usual(self, indices)
        data = bytearray(store.get(key))
        data[-1] ^= 4
        store.put(key, bytes(data))

    monkeypatch.setattr(CheckpointReader, "check_there", check_and_replace)
    with pytest.raises(StorageError, match="replaced") as caught:
        engine.load_checkpoint(uri, options=options)
    assert caught.value.where == f"s3://{bucket}/replaced/{key}"
    engine.destroy()

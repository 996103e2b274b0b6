"""Saves in the background to a real S3 server, straight from memory, through a network on a bad day."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time

import pytest

from raydz.checkpoint import committed_steps
from raydz.errors import CheckpointError
from raydz.storage import S3Options, open_store
from tests.checkpoint.states import Setup, assert_same_bits, build, stored_tensors, train
from tests.support.fault_proxy import Fault, fault_proxy

pytestmark = pytest.mark.s3

MIB = 1 << 20
LARGE = Setup(stage=1, shapes=((1000, 1100),))
"""13 MB of state: three parts of 5 MiB."""


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=2" in path


def is_manifest(method: str, path: str) -> bool:
    return method == "PUT" and path.endswith("manifest.json")


def is_complete(method: str, path: str) -> bool:
    return method == "POST" and "uploadId" in path


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def proxy(s3_env):
    with fault_proxy(s3_env.endpoint_url) as running:
        yield running


def options_for(endpoint_url: str, **changes) -> S3Options:
    return S3Options(
        endpoint_url=endpoint_url, part_bytes_min=5 * MIB, part_bytes_max=5 * MIB, read_timeout_s=1.0, max_attempts=2,
        **changes,
    )  # fmt: skip


def download(server, bucket, prefix, folder):
    """Plain boto3 fetches what lies under the prefix."""
    with contextlib.closing(server.client()) as client:
        for entry in client.list_objects_v2(Bucket=bucket, Prefix=prefix)["Contents"]:
            target = folder / entry["Key"]
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(client.get_object(Bucket=bucket, Key=entry["Key"])["Body"].read())


@pytest.mark.parametrize("checksum", ["auto", pytest.param("crc64nvme", marks=pytest.mark.slow)])
def test_image_is_uploaded_in_equal_parts_bit_for_bit(s3_env, proxy, tmp_path, checksum):
    bucket, engine = s3_env.bucket(), build(LARGE)
    train(engine, 1, 1)
    engine.save_checkpoint(tmp_path / "sync")
    uri = f"s3://{bucket}/run"
    handle = engine.save_checkpoint(uri, options=options_for(proxy.endpoint_url, checksum=checksum), async_save=True)
    train(engine, 2, 3)
    assert handle.result(60) == f"{uri}/step-0000000001"
    parts = [path for method, path in proxy.seen if method == "PUT" and "partNumber" in path]
    assert len(parts) == 3 and handle.num_bytes > 12 * MIB
    download(s3_env, bucket, "run", tmp_path / "copy")
    assert_same_bits(stored_tensors(tmp_path / "copy"), stored_tensors(tmp_path / "sync"))
    engine.destroy()


FAULTS = [
    ("busy", is_part, 5), ("break", is_part, 3), ("lost", is_part, 2), ("stall", is_part, 1),
    ("busy", is_manifest, 3), ("lost", is_manifest, 1), ("lost", is_complete, 1), ("reset", is_complete, 1),
]  # fmt: skip
FAST = [("break", is_part, 3), ("lost", is_manifest, 1)]


@pytest.mark.parametrize(
    ("kind", "matches", "times"),
    [
        pytest.param(*fault, id=f"{fault[0]}-{fault[1].__name__}", marks=[] if fault in FAST else pytest.mark.slow)
        for fault in FAULTS
    ],
)
def test_faults_that_pass_cost_time_and_nothing_else(s3_env, proxy, tmp_path, kind, matches, times):
    bucket, engine = s3_env.bucket(), build(LARGE)
    train(engine, 1, 1)
    engine.save_checkpoint(tmp_path / "sync")
    proxy.faults.append(Fault(kind, matches, times))
    handle = engine.save_checkpoint(f"s3://{bucket}/run", options=options_for(proxy.endpoint_url), async_save=True)
    train(engine, 2, 4)
    handle.result(60)
    assert all(fault.times == 0 for fault in proxy.faults)
    download(s3_env, bucket, "run", tmp_path / "copy")
    assert_same_bits(stored_tensors(tmp_path / "copy"), stored_tensors(tmp_path / "sync"))
    engine.destroy()


@pytest.mark.slow
def test_storm_that_does_not_pass_fails_the_save_and_nothing_else(s3_env, proxy):
    bucket, engine = s3_env.bucket(), build(LARGE)
    uri, options = f"s3://{bucket}/run", options_for(proxy.endpoint_url)
    train(engine, 1, 1)
    engine.save_checkpoint(uri, options=options, async_save=True).result(60)
    store = open_store(uri, options)
    store._connection.rounds = 2
    for kind in ("busy", "stall"):
        proxy.faults.append(Fault(kind, is_part, times=1000))
        handle = engine.save_async(store, "step-0000000002", step=2, state={})
        train(engine, 2, 2)
        assert kind == "busy" or not handle.done, "training goes on while the save waits for seconds"
        with pytest.raises(CheckpointError, match="not saved"):
            handle.result(60)
        proxy.faults.clear()
        assert committed_steps(store) == [1] and store.sweep(0) == 0, "aborted, and the last good one is the newest"
    assert engine.save_async(store, "step-0000000002", step=2, state={}).result(60).endswith("2")
    assert committed_steps(store) == [1, 2]
    engine.destroy()


_KILLED = """
import os, sys, time
from tests.checkpoint.states import build, train
from tests.checkpoint.test_async_s3 import LARGE, options_for
engine = build(LARGE)
train(engine, 1, 1)
options = options_for(sys.argv[2])
engine.save_checkpoint(sys.argv[1], options=options, async_save=True).result()
train(engine, 2, 2)
print("first is there", flush=True)
sys.stdin.readline()
engine.save_checkpoint(sys.argv[1], options=options, async_save=True)
for step in range(3, 1000000):
    train(engine, step, step)
"""


def is_third_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=3" in path


@pytest.mark.slow
@pytest.mark.parametrize(("stalled", "num_uploads", "num_files"), [(is_third_part, 1, 0), (is_manifest, 0, 1)])
def test_process_killed_between_parts_or_before_the_commit_leaves_the_one_before(
    s3_env, proxy, stalled, num_uploads, num_files
):
    uri, options = f"s3://{s3_env.bucket()}/run", options_for(proxy.endpoint_url)
    command = [sys.executable, "-c", _KILLED, uri, proxy.endpoint_url]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "first is there\n"
            proxy.faults.append(Fault("stall", stalled, times=100))
            proxy.seen.clear()
            process.stdin.write("go\n")
            process.stdin.flush()
            deadline = time.monotonic() + 60
            while not any(stalled(*request) for request in proxy.seen):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.3)  # the second part has its answer by now
        finally:
            process.kill()
    proxy.faults.clear()
    store = open_store(uri, options)
    assert committed_steps(store) == [1]
    assert len(store.list("step-0000000002/")) == num_files
    assert store.sweep(0) == num_uploads
    engine = build(LARGE)
    assert engine.load_checkpoint(uri, options=options)[0].endswith("step-0000000001")
    train(engine, 2, 2)
    engine.save_checkpoint(uri, options=options, async_save=True).result(60)  # over the torn one
    assert committed_steps(store) == [1, 2]
    engine.destroy()

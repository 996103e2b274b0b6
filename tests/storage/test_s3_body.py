"""Bytes that stay where they are until the commit are sent from there."""

from __future__ import annotations

import mmap
import random
import tracemalloc

import pytest

from raydz.storage import S3Options, open_store
from raydz.storage.s3_body import MemoryBody
from tests.support.seaweed import set_aws_environment

MIB = 1 << 20
SMALL = {"part_bytes_min": 5 * MIB, "part_bytes_max": 5 * MIB}


def lasting(data: bytes) -> memoryview:
    memory = mmap.mmap(-1, len(data))
    memory[:] = data
    return memoryview(memory)


def test_file_over_memory_reads_and_seeks_as_files_do():
    import io

    data = random.Random(1).randbytes(100)
    body, oracle = MemoryBody(memoryview(data)), io.BytesIO(data)
    assert len(body) == 100
    for amount in (0, 7, 50, 90, 5, None):
        assert bytes(body.read(amount)) == oracle.read(amount)
        assert body.tell() == oracle.tell()
    for place in ((3,), (-4, 2), (-5, 1), (0, 0)):
        assert body.seek(*place) == oracle.seek(*place)
        assert bytes(body.read(9)) == oracle.read(9)


@pytest.mark.s3
@pytest.mark.parametrize("sizes", [(5 * MIB,), (MIB, 11 * MIB, 3), (6 * MIB, 6 * MIB)])
def test_object_is_what_was_written_in_lasting_and_passing_pieces(s3_env, sizes):
    store = open_store(f"s3://{s3_env.shared_bucket}/body", S3Options(endpoint_url=s3_env.endpoint_url, **SMALL))
    parts = [random.Random(n).randbytes(n) for n in sizes]
    for stays in ((True, True, True), (True, False, True), (False, True, False)):
        with store.writer("k", sum(sizes)) as out:
            for part, is_lasting in zip(parts, stays, strict=False):
                out.write(lasting(part), stays=is_lasting)
        assert store.get("k") == b"".join(parts)
        assert out.bytes_written == sum(sizes)


@pytest.mark.s3
def test_no_copy_is_made_of_what_stays(s3_env):
    store = open_store(f"s3://{s3_env.shared_bucket}/body", S3Options(endpoint_url=s3_env.endpoint_url, **SMALL))
    body = lasting(random.Random(2).randbytes(25 * MIB))
    store.put("warm", bytes(12 * MIB))
    tracemalloc.start()
    try:
        with store.writer("k", len(body)) as out:
            out.write(body, stays=True)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4 * MIB, "less than one part"


@pytest.mark.s3
@pytest.mark.slow
@pytest.mark.parametrize("checksum", ["auto", "crc64nvme", "off"])
def test_lasting_bytes_go_over_https_with_every_kind_of_checksum(s3_server_https, checksum, monkeypatch):
    set_aws_environment(monkeypatch, s3_server_https.env)
    options = S3Options(endpoint_url=s3_server_https.endpoint_url, checksum=checksum, **SMALL)
    store = open_store(f"s3://{s3_server_https.shared_bucket}/lasting-{checksum}", options)
    for size in (1000, 12 * MIB + 1):
        data = random.Random(size).randbytes(size)
        with store.writer("k", size) as out:
            out.write(lasting(data), stays=True)
        assert store.get("k") == data


@pytest.mark.s3
def test_bandwidth_limit_holds_for_lasting_bytes(s3_env):
    import time

    limited = S3Options(endpoint_url=s3_env.endpoint_url, bandwidth_limit=8 * MIB, **SMALL)
    store = open_store(f"s3://{s3_env.shared_bucket}/limited", limited)
    started = time.monotonic()
    with store.writer("k", 11 * MIB) as out:
        out.write(lasting(bytes(11 * MIB)), stays=True)
    assert time.monotonic() - started > 1.0

"""Uploads: sizes of parts, bounded memory, checksums, lost answers, aborts."""

from __future__ import annotations

import base64
import contextlib
import random
import threading
import tracemalloc
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raydz.errors import StorageError
from raydz.storage import AlreadyExists, S3Options, Store, StoreUnavailable, open_store
from raydz.storage.s3 import S3Store
from raydz.storage.s3_writer import MAX_PARTS, part_bytes_for
from tests.support.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.support.seaweed import SeaweedServer, set_aws_environment

pytestmark = pytest.mark.s3

MIB = 1 << 20
SMALL = {"part_bytes_min": 5 * MIB, "part_bytes_max": 5 * MIB}


def is_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber" in path


def is_put(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber" not in path


def is_complete(method: str, path: str) -> bool:
    return method == "POST" and "uploadId" in path


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def direct(s3_env: SeaweedServer) -> Store:
    return open_store(f"s3://{s3_env.bucket()}/p", S3Options(endpoint_url=s3_env.endpoint_url, **SMALL))


@pytest.fixture
def broken(direct: S3Store, s3_env: SeaweedServer) -> Iterator[tuple[S3Store, FaultProxy]]:
    """The same store through a proxy that breaks answers."""
    with fault_proxy(s3_env.endpoint_url) as proxy:
        yield open_store(direct.uri, S3Options(endpoint_url=proxy.endpoint_url, max_attempts=2, **SMALL)), proxy


@given(st.integers(0, 10 << 40), st.integers(1, 64))
def test_parts_fit_the_limits_of_s3(expected_bytes: int, concurrency: int) -> None:
    options = S3Options(concurrency=concurrency)
    part_bytes = part_bytes_for(options, expected_bytes)
    assert part_bytes % MIB == 0
    assert part_bytes * MAX_PARTS >= expected_bytes
    assert part_bytes >= options.part_bytes_min
    assert part_bytes <= options.part_bytes_max or expected_bytes > 9_000 * options.part_bytes_max


def test_small_bodies_take_one_request_and_large_ones_equal_parts(broken) -> None:
    store, proxy = broken
    for size, requests in ((5 * MIB, 1), (12 * MIB, 5)):
        proxy.seen.clear()
        with store.writer("k", expected_bytes=size) as out:
            out.write(bytes(size))
        assert len(proxy.seen) == requests  # create, three parts, complete


def test_memory_stays_bounded(direct: S3Store) -> None:
    """80 MiB through parts of 5 MiB: four in flight, one being filled, and what boto3 copies of them."""
    piece = memoryview(bytes(MIB))
    direct.put("warm", b"x")
    tracemalloc.start()
    try:
        with direct.writer("k", expected_bytes=80 * MIB) as out:
            for _ in range(80):
                out.write(piece)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert out.bytes_written == 80 * MIB
    assert peak < 40 * MIB


@pytest.mark.parametrize("kind", ["busy", "lost"])
def test_a_part_is_sent_again_after_boto3_gave_up(broken, direct: Store, kind: str) -> None:
    store, proxy = broken
    body = random.Random(5).randbytes(12 * MIB)
    proxy.faults.append(Fault(kind, is_part, times=5))
    with store.writer("k") as out:
        out.write(body)
    assert direct.get("k") == body


def test_a_part_that_cannot_be_sent_aborts_the_upload(broken, direct: Store) -> None:
    store, proxy = broken
    store._connection.rounds = 2
    proxy.faults.append(Fault("busy", is_part, times=1000))
    with pytest.raises(StoreUnavailable), store.writer("k") as out:
        for _ in range(1000):
            out.write(bytes(5 * MIB))
    assert out.bytes_written < 200 * MIB  # told long before the last byte
    assert direct.list() == []
    assert direct.sweep(0) == 0


def test_an_abort_that_fails_is_warned_about_and_hides_nothing(
    broken, direct: Store, caplog: pytest.LogCaptureFixture
) -> None:
    store, proxy = broken
    proxy.faults.append(Fault("busy", lambda method, _: method == "DELETE", times=100))
    with pytest.raises(ValueError, match="the cause"), store.writer("k") as out:
        out.write(bytes(11 * MIB))
        raise ValueError("the cause")
    assert "stays behind until the next sweep" in caplog.text
    assert direct.sweep(0) == 1


def test_a_lost_answer_to_a_conditional_put_is_no_refusal(broken, direct: Store) -> None:
    """boto3 repeats the put, the store refuses the repetition: yet it was ours that won."""
    store, proxy = broken
    proxy.faults.append(Fault("lost", is_put))
    store.put("k", b"ours", if_absent=True)
    assert len([seen for seen in proxy.seen if seen[0] == "PUT"]) == 2
    assert direct.get("k") == b"ours"


def test_a_lost_answer_does_not_turn_a_refusal_into_a_win(broken, direct: Store) -> None:
    store, proxy = broken
    direct.put("k", b"same bytes", if_absent=True)
    proxy.faults.append(Fault("lost", is_put))
    with pytest.raises(AlreadyExists):
        store.put("k", b"same bytes", if_absent=True)


def test_a_lost_answer_to_the_completion_is_a_success(broken, direct: Store) -> None:
    store, proxy = broken
    proxy.faults.append(Fault("lost", is_complete))
    with store.writer("k") as out:
        out.write(bytes(6 * MIB))
    assert out.info == direct.head("k")


def test_an_upload_that_someone_aborted_is_told(direct: S3Store, s3_env: SeaweedServer) -> None:
    with pytest.raises(StorageError, match="aborted by someone else"), direct.writer("k") as out:
        out.write(bytes(11 * MIB))
        for part in out._upload._parts:
            part.result()
        assert direct.sweep(0) == 1
    assert direct.list() == []


def test_more_parts_than_s3_allows_is_told(direct: S3Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydz.storage.s3_writer.MAX_PARTS", 2)
    with pytest.raises(StorageError, match="more than 2 parts"), direct.writer("k", expected_bytes=1) as out:
        out.write(bytes(16 * MIB))
    assert direct.sweep(0) == 0


@pytest.mark.parametrize("name", ["crc64nvme", "crc32c", "crc32"])
@pytest.mark.parametrize("size", [1000, 12 * MIB + 5])
def test_the_store_holds_the_checksum_of_the_whole_object(s3_env: SeaweedServer, name: str, size: int) -> None:
    """The oracle is one pass of awscrt over the whole body, against what the server stored."""
    from awscrt import checksums

    bucket = s3_env.bucket()
    body = random.Random(6).randbytes(size)
    store = open_store(f"s3://{bucket}", S3Options(endpoint_url=s3_env.endpoint_url, checksum=name, **SMALL))
    with store.writer("k") as out:
        out.write(body)
    with contextlib.closing(s3_env.client()) as client:
        head = client.head_object(Bucket=bucket, Key="k", ChecksumMode="ENABLED")
    want = getattr(checksums, name)(body).to_bytes(8 if name == "crc64nvme" else 4, "big")
    assert base64.b64decode(head[f"Checksum{name.upper()}"]) == want


@pytest.mark.parametrize("size", [1000, 12 * MIB])
def test_a_bit_flipped_on_the_way_is_refused_by_the_store(
    s3_env: SeaweedServer, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The body changes between the checksum and the request."""
    store = open_store(
        f"s3://{s3_env.bucket()}", S3Options(endpoint_url=s3_env.endpoint_url, checksum="crc64nvme", **SMALL)
    )

    def flip(params: dict, **_: object) -> dict:
        body = bytearray(params["Body"])
        body[-1] ^= 1
        return {**params, "Body": body}

    for operation in ("PutObject", "UploadPart"):
        store._connection.client.meta.events.register(f"provide-client-params.s3.{operation}", flip)
    with pytest.raises(StoreUnavailable, match="damaged on the way"), store.writer("k") as out:
        out.write(bytes(size))
    assert store.list() == []


@pytest.mark.parametrize("checksum", ["auto", "crc64nvme", "crc32c", "crc32", "off"])
def test_every_checksum_works_over_https(
    s3_server_https: SeaweedServer, checksum: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aws_environment(monkeypatch, s3_server_https.env)
    options = S3Options(endpoint_url=s3_server_https.endpoint_url, checksum=checksum, **SMALL)
    store = open_store(f"s3://{s3_server_https.shared_bucket}/{checksum}", options)
    store.probe_writable()
    for size in (0, 1000, 12 * MIB + 1):
        body = random.Random(size).randbytes(size)
        store.put("put", body)
        with store.writer("written") as out:
            out.write(body)
        assert store.get("put") == store.get("written") == body


def test_trailing_checksums_are_sent_over_https(
    s3_server_https: SeaweedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_aws_environment(monkeypatch, s3_server_https.env)
    store = open_store(
        f"s3://{s3_server_https.bucket()}", S3Options(endpoint_url=s3_server_https.endpoint_url, **SMALL)
    )
    headers: list[str] = []
    store._connection.client.meta.events.register(
        "before-send.s3", lambda request, **_: headers.append(str(request.headers.get("x-amz-trailer")))
    )
    with store.writer("k") as out:
        out.write(bytes(11 * MIB))
    assert len([header for header in headers if "x-amz-checksum-crc32" in header]) == 3


def test_threads_end_with_the_writer(direct: S3Store) -> None:
    with direct.writer("k") as out:
        out.write(bytes(11 * MIB))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raydz-s3")]

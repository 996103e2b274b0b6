"""The cap on bytes per second: on paper with a clock of our own, and on a real server by the clock on the wall."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raydz.storage import S3Options, open_store
from raydz.storage.bandwidth import BURST_S, Bandwidth, process_bandwidth
from tests.support.seaweed import SeaweedServer, set_aws_environment

MIB = 1 << 20


class Clock:
    """Time that passes only while someone sleeps."""

    def __init__(self) -> None:
        self.time = 100.0

    def now(self) -> float:
        return self.time

    def sleep(self, seconds: float) -> None:
        self.time += seconds


def test_bytes_take_their_time() -> None:
    clock = Clock()
    bandwidth = Bandwidth(1000.0, clock.now, clock.sleep)
    for size in (100, 400, 1, 1500):
        bandwidth.take(size)
    assert clock.time - 100 == pytest.approx(2001 / 1000 - BURST_S)


def test_a_pause_is_not_saved_up() -> None:
    clock = Clock()
    bandwidth = Bandwidth(1000.0, clock.now, clock.sleep)
    bandwidth.take(10)
    clock.sleep(3600)
    before = clock.time
    bandwidth.take(5000)
    assert clock.time - before == pytest.approx(5 - BURST_S)


def test_threads_share_one_limit() -> None:
    bandwidth = Bandwidth(1e6)
    begin = time.monotonic()
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(bandwidth.take, [100_000] * 4))
    assert time.monotonic() - begin >= 0.4 - BURST_S - 0.01


def test_stores_of_a_process_share_one_limit() -> None:
    assert process_bandwidth(5.0) is process_bandwidth(5.0)
    assert process_bandwidth(5.0) is not process_bandwidth(6.0)


@pytest.mark.s3
@pytest.mark.parametrize(
    ("server", "size"),
    [
        ("s3_server", 2 * MIB),
        *(pytest.param("s3_server_https", size, marks=pytest.mark.slow) for size in (2 * MIB, 12 * MIB)),
    ],
)
def test_uploads_and_downloads_are_slowed_down_and_whole(server: str, size: int, request, monkeypatch) -> None:
    found: SeaweedServer = request.getfixturevalue(server)
    set_aws_environment(monkeypatch, found.env)
    rate = 4 * size
    options = S3Options(found.endpoint_url, part_bytes_min=5 * MIB, part_bytes_max=5 * MIB, bandwidth_limit=rate)
    store = open_store(f"s3://{found.shared_bucket}/bandwidth", options)
    body = random.Random(1).randbytes(size)
    out = bytearray(size)

    def write(stays: bool) -> None:
        with store.writer("k") as writer:
            writer.write(body, stays=stays)

    transfers = (
        lambda: write(stays=False),
        lambda: write(stays=True),
        lambda: store.get("k"),
        lambda: store.read_into("k", 0, memoryview(out)),
    )
    for transfer in transfers:
        begin = time.monotonic()
        transfer()
        assert time.monotonic() - begin >= 0.25 - BURST_S - 0.01
    assert store.get("k") == body == bytes(out)

"""Reads over a network that breaks: retried, continued, and always from one version."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import pytest

from raydz.errors import StorageError
from raydz.storage import ObjectChanged, S3Options, Store, StoreUnavailable, open_store
from raydz.storage.s3 import S3Store
from tests.support.fault_proxy import Fault, FaultProxy, fault_proxy
from tests.support.seaweed import SeaweedServer

pytestmark = pytest.mark.s3

MIB = 1 << 20
BODY = random.Random(3).randbytes(2 * MIB)


def is_get(method: str, _: str) -> bool:
    return method == "GET"


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 0.01)


@pytest.fixture
def direct(s3_env: SeaweedServer) -> Store:
    return open_store(f"s3://{s3_env.bucket()}/p", S3Options(endpoint_url=s3_env.endpoint_url))


@pytest.fixture
def broken(direct: S3Store, s3_env: SeaweedServer) -> Iterator[tuple[S3Store, FaultProxy]]:
    """The same store through a proxy that breaks answers, parts of 5 MiB, one request a round."""
    with fault_proxy(s3_env.endpoint_url) as proxy:
        options = S3Options(
            endpoint_url=proxy.endpoint_url, max_attempts=1, part_bytes_min=5 * MIB, part_bytes_max=5 * MIB
        )
        yield open_store(direct.uri, options), proxy


@pytest.mark.parametrize("kind", ["reset", "truncate", "busy", "lost"])
def test_a_read_goes_on_after_the_answer_breaks_off(broken, direct: Store, kind: str) -> None:
    store, proxy = broken
    direct.put("k", BODY)
    proxy.faults.append(Fault(kind, is_get, times=2))
    out = bytearray(MIB)
    store.read_into("k", 1000, memoryview(out))
    assert out == BODY[1000 : 1000 + MIB]
    proxy.faults.append(Fault(kind, is_get, times=2))
    assert store.get("k") == BODY


def test_a_second_try_asks_only_for_what_is_missing(broken, direct: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    store, proxy = broken
    direct.put("k", BODY)
    ranges: list[str] = []
    store._connection.client.meta.events.register(
        "provide-client-params.s3.GetObject", lambda params, **_: ranges.append(params["Range"])
    )
    proxy.faults.append(Fault("truncate", is_get))
    store.read_into("k", 0, memoryview(bytearray(MIB)))
    assert ranges == [f"bytes=0-{MIB - 1}", f"bytes={MIB // 2}-{MIB - 1}"]


def test_a_read_gives_up_in_the_end(broken, direct: Store) -> None:
    store, proxy = broken
    direct.put("k", BODY)
    proxy.faults.append(Fault("truncate", is_get, times=100))
    with pytest.raises(StoreUnavailable, match="broke off"):
        store.get("k")
    assert len(proxy.seen) == 4


def test_a_replacement_between_two_tries_is_told_not_mixed(broken, direct: Store) -> None:
    store, proxy = broken
    direct.put("k", BODY)

    proxy.faults.append(Fault("truncate", is_get))
    store._connection.client.meta.events.register(
        "provide-client-params.s3.GetObject",
        lambda params, **_: direct.put("k", bytes(len(BODY))) if "IfMatch" in params else None,
    )
    with pytest.raises(ObjectChanged):
        store.read_into("k", 0, memoryview(bytearray(MIB)))


def test_a_large_read_is_split_and_every_piece_is_pinned(broken, direct: Store) -> None:
    store, proxy = broken
    body = random.Random(4).randbytes(12 * MIB)
    direct.put("k", body)
    proxy.faults.append(Fault("reset", is_get, times=2))
    conditions: list[str] = []
    store._connection.client.meta.events.register(
        "provide-client-params.s3.GetObject", lambda params, **_: conditions.append(params["IfMatch"])
    )
    out = bytearray(len(body))
    store.read_into("k", 0, memoryview(out))
    assert out == body
    assert len(conditions) == 5  # three pieces, two of them twice
    assert set(conditions) == {direct.head("k").etag}


def test_a_store_that_ignores_ranges_is_refused(direct: S3Store, s3_env: SeaweedServer) -> None:
    direct.put("k", BODY)
    client = direct._connection.client
    with contextlib.ExitStack() as stack:
        event = "provide-client-params.s3.GetObject"
        drop = lambda params, **_: {name: value for name, value in params.items() if name != "Range"}  # noqa: E731
        client.meta.events.register(event, drop)
        stack.callback(client.meta.events.unregister, event, drop)
        for read in (
            lambda: direct.get("k", 10, 20),
            lambda: direct.read_into("k", 10, memoryview(bytearray(10))),
        ):
            with pytest.raises(StorageError, match="ignores byte ranges"):
                read()

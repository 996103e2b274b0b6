"""The contract of `Store`, on every implementation."""

from __future__ import annotations

import pickle
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from raydz.errors import StorageError
from raydz.storage import AlreadyExists, NotFound, ObjectChanged, Store
from raydz.storage.local import LocalStore
from raydz.storage.store import check_key

MIB = 1 << 20
BODY = bytes(range(256)) * 4


def test_get_returns_what_was_put(store: Store) -> None:
    store.put("a/b.bin", BODY)
    assert store.get("a/b.bin") == BODY


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_put_takes_any_buffer(store: Store, kind: type) -> None:
    store.put("k", kind(BODY))
    assert store.get("k") == BODY


def test_an_empty_object_is_an_object(store: Store) -> None:
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert store.head("empty").bytes == 0
    assert store.get("empty", 0, 10) == b""


def test_put_replaces_and_changes_the_etag(store: Store) -> None:
    store.put("k", b"one")
    before = store.head("k")
    store.put("k", b"two!")
    assert store.get("k") == b"two!"
    assert store.head("k").bytes == 4
    assert store.head("k").etag != before.etag


@pytest.mark.parametrize(("start", "stop"), [(None, 5), (5, None), (3, 9), (0, 1), (7, 7), (1000, 5000), (5000, 6000)])
def test_ranges_are_slices(store: Store, start: int | None, stop: int | None) -> None:
    store.put("k", BODY)
    assert store.get("k", start, stop) == BODY[start:stop]


@pytest.mark.parametrize(("start", "stop"), [(-1, 5), (5, 3)])
def test_a_range_that_is_none_is_refused(store: Store, start: int, stop: int) -> None:
    store.put("k", BODY)
    with pytest.raises(StorageError, match="not a byte range"):
        store.get("k", start, stop)


def test_a_missing_key_is_told_everywhere(store: Store) -> None:
    for read in (
        lambda: store.get("none"),
        lambda: store.get("none", 3, 3),
        lambda: store.read_into("none", 0, memoryview(bytearray(3))),
    ):
        with pytest.raises(NotFound, match="none"):
            read()
    assert store.head("none") is None
    assert not store.exists("none")
    assert store.list() == []
    assert store.list_folders() == []


def test_a_folder_is_no_object(store: Store) -> None:
    store.put("folder/k", b"x")
    assert store.head("folder") is None
    with pytest.raises(NotFound):
        store.get("folder")


def test_read_into_fills_all_of_the_buffer(store: Store) -> None:
    store.put("k", BODY)
    out = bytearray(100)
    store.read_into("k", 17, memoryview(out))
    assert out == BODY[17:117]
    store.read_into("k", 17, memoryview(bytearray()))


@pytest.mark.parametrize("start", [len(BODY) - 99, len(BODY), len(BODY) + 1])
def test_read_into_past_the_end_is_an_error(store: Store, start: int) -> None:
    store.put("k", BODY)
    with pytest.raises(StorageError, match="shorter than the range") as caught:
        store.read_into("k", start, memoryview(bytearray(100)))
    assert str(len(BODY)) in str(caught.value)


def test_reads_can_be_pinned_to_a_version(store: Store) -> None:
    store.put("k", b"one")
    etag = store.head("k").etag
    assert store.get("k", if_match=etag) == b"one"
    store.put("k", b"two")
    with pytest.raises(ObjectChanged):
        store.get("k", if_match=etag)
    with pytest.raises(ObjectChanged):
        store.read_into("k", 0, memoryview(bytearray(3)), if_match=etag)


def test_if_absent_refuses_a_taken_key_and_keeps_it(store: Store) -> None:
    store.put("k", b"first", if_absent=True)
    for body in (b"second", b"first"):
        with pytest.raises(AlreadyExists, match="k"):
            store.put("k", body, if_absent=True)
    assert store.get("k") == b"first"


def test_sixteen_racing_conditional_puts_have_one_winner(store: Store) -> None:
    barrier = threading.Barrier(16)

    def race(number: int) -> int | None:
        barrier.wait()
        try:
            store.put("manifest.json", b"%d" % number, if_absent=True)
        except AlreadyExists:
            return None
        return number

    # SeaweedFS makes the losers wait for seconds; one race there, many where they are cheap.
    for _ in range(20 if isinstance(store, LocalStore) else 1):
        with ThreadPoolExecutor(16) as pool:
            winners = [number for number in pool.map(race, range(16)) if number is not None]
        assert len(winners) == 1
        assert store.get("manifest.json") == b"%d" % winners[0]
        store.delete(["manifest.json"])


def test_list_is_sorted_recursive_and_by_string_prefix(store: Store) -> None:
    keys = ["b", "a/z", "a/b/c", "ab", "step-10/x", "step-9/x", "ü/ß", "sp ace/+&%"]
    for key in keys:
        store.put(key, b"x")
    assert store.list() == sorted(keys)
    assert store.list("a") == ["a/b/c", "a/z", "ab"]
    assert store.list("a/") == ["a/b/c", "a/z"]
    assert store.list("step-") == ["step-10/x", "step-9/x"]
    assert store.list("nothing/") == []


def test_list_folders_names_only_immediate_folders_with_keys(store: Store) -> None:
    for key in ("top", "a/x", "b/c/x", "b/d/x", "ba/x"):
        store.put(key, b"x")
    assert store.list_folders() == ["a", "b", "ba"]
    assert store.list_folders("b") == store.list_folders("b/") == ["c", "d"]
    assert store.list_folders("none") == []


def test_delete_removes_only_its_keys_and_forgives_missing_ones(store: Store) -> None:
    for key in ("a/1", "a/2", "b"):
        store.put(key, b"x")
    store.delete(["a/1", "none", "b"])
    assert store.list() == ["a/2"]
    store.delete([])


@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "..", "a/../x", "a/..", "./a", "a//b", "a/", "a\0b", ".raydz-tmp-x", "x" * 2000]
)
def test_a_key_that_leaves_the_root_is_no_key(key: str) -> None:
    with pytest.raises(StorageError):
        check_key(key, "here")


@pytest.mark.parametrize("key", ["a", "a/b.bin", "..a", "a..", ".hidden/x", "ü", "a b"])
def test_other_names_are_keys(key: str) -> None:
    assert check_key(key, "here") == key


def test_every_call_checks_its_key_and_prefix(store: Store) -> None:
    for call in (
        lambda: store.put("../x", b"x"),
        lambda: store.get("../x"),
        lambda: store.read_into("../x", 0, memoryview(bytearray(1))),
        lambda: store.head("../x"),
        lambda: store.exists("../x"),
        lambda: store.delete(["../x"]),
        lambda: store.writer("../x"),
        lambda: store.list("../x"),
        lambda: store.list("/"),
        lambda: store.list_folders(".."),
    ):
        with pytest.raises(StorageError, match="not a key"):
            call()


@pytest.mark.parametrize("size", [0, 1, 5 * MIB - 1, 5 * MIB, 5 * MIB + 1, 10 * MIB, 12 * MIB + 3])
def test_a_writer_keeps_every_byte_at_awkward_sizes(store: Store, size: int) -> None:
    body = random.Random(size).randbytes(size)
    view = memoryview(body)
    with store.writer("big", expected_bytes=size) as out:
        for begin in range(0, size, 3 * MIB + 7):
            out.write(view[begin : begin + 3 * MIB + 7])
    assert out.bytes_written == size
    assert store.get("big") == body
    assert out.info == store.head("big")


def test_a_writer_may_be_given_no_size_or_a_wrong_one(store: Store) -> None:
    body = random.Random(0).randbytes(11 * MIB)
    for expected_bytes in (None, 10, 1 << 30):
        with store.writer("k", expected_bytes) as out:
            out.write(memoryview(body))
        assert store.get("k") == body


def test_a_writer_copies_what_it_is_given(store: Store) -> None:
    scratch = bytearray(6 * MIB)
    with store.writer("k") as out:
        for value in (1, 2):
            scratch[:] = bytes([value]) * len(scratch)
            out.write(memoryview(scratch))
        scratch[:] = bytes(len(scratch))
    assert store.get("k") == b"\1" * 6 * MIB + b"\2" * 6 * MIB


def test_read_into_larger_than_a_part_is_whole(store: Store) -> None:
    body = random.Random(1).randbytes(13 * MIB)
    store.put("k", body)
    out = bytearray(12 * MIB)
    store.read_into("k", MIB // 2, memoryview(out))
    assert out == body[MIB // 2 : MIB // 2 + 12 * MIB]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit])
@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_a_torn_writer_leaves_nothing_visible(store: Store, error: type[BaseException], size: int) -> None:
    with pytest.raises(error, match="torn"), store.writer("a/torn", expected_bytes=size) as out:
        out.write(bytes(size))
        raise error("torn")
    assert store.list() == []
    assert not store.exists("a/torn")
    assert store.sweep(0) == 0


def test_a_torn_writer_leaves_the_object_it_would_have_replaced(store: Store) -> None:
    store.put("k", b"good")
    with pytest.raises(ValueError, match="torn"), store.writer("k") as out:
        out.write(bytes(6 * MIB))
        raise ValueError("torn")
    assert store.get("k") == b"good"


def test_a_half_written_object_is_invisible_until_the_end(store: Store) -> None:
    with store.writer("k") as out:
        out.write(bytes(11 * MIB))
        assert store.list() == []
        assert store.list_folders() == []
        assert not store.exists("k")
    assert store.list() == ["k"]


def test_objects_are_listed_with_size_and_time(store: Store) -> None:
    begin = time.time()
    store.put("a/long", bytes(1000))
    store.put("a/b/empty", b"")
    store.put("c", b"xyz")
    found = store.list_objects("a/")
    assert [(each.key, each.bytes) for each in found] == [("a/b/empty", 0), ("a/long", 1000)]
    assert all(begin - 2 <= each.modified <= time.time() + 2 for each in found)  # S3 tells whole seconds
    assert [each.key for each in store.list_objects()] == store.list()


def test_probe_passes_and_leaves_nothing(store: Store) -> None:
    begin = time.monotonic()
    assert store.probe_writable() == []
    assert time.monotonic() - begin < 10
    assert store.list() == []


def test_a_store_survives_pickling(store: Store) -> None:
    store.put("k", BODY)
    pickled = pickle.dumps(store)
    assert b"secret" not in pickled
    copy = pickle.loads(pickled)
    assert copy.uri == store.uri
    assert copy.get("k") == BODY

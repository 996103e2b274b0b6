"""The self-test on S3: what a good store shows, what weak ones are told, and how raydz makes up for them."""

from __future__ import annotations

import contextlib
import pickle
import random
import time

import pytest

from raydz.errors import StorageError
from raydz.storage import AlreadyExists, S3Options, open_store
from raydz.storage.probe import ABORTS, CHECKSUMS, CONDITIONS
from tests.support import old_store as old
from tests.support.fault_proxy import Fault, fault_proxy
from tests.support.seaweed import SeaweedServer, set_aws_environment

pytestmark = pytest.mark.s3
MIB = 1 << 20
SMALL = {"part_bytes_min": 5 * MIB, "part_bytes_max": 5 * MIB, "max_attempts": 2}


@pytest.fixture
def bucket(s3_env: SeaweedServer) -> str:
    return s3_env.bucket()


@pytest.mark.parametrize(
    ("server", "checksum"),
    [
        ("s3_server", "auto"),
        ("s3_server_https", "crc64nvme"),
        *(pytest.param("s3_server", name, marks=pytest.mark.slow) for name in ("crc32", "crc32c", "crc64nvme")),
        *(pytest.param("s3_server_https", name, marks=pytest.mark.slow) for name in ("auto", "crc32", "crc32c")),
    ],
)
def test_a_good_store_has_no_weakness(server: str, checksum: str, request, monkeypatch, caplog) -> None:
    found: SeaweedServer = request.getfixturevalue(server)
    set_aws_environment(monkeypatch, found.env)
    # A prefix of its own: other tests write to the shared bucket too.
    store = open_store(
        f"s3://{found.shared_bucket}/good-store-{checksum}", S3Options(found.endpoint_url, checksum=checksum)
    )
    begin = time.monotonic()
    assert store.probe_writable() == []
    assert time.monotonic() - begin < 10
    assert [record for record in caplog.records if record.name.startswith("raydz")] == []
    assert store.list() == [] and store.sweep(0) == 0


def test_a_store_that_ignores_conditions_is_refused_unless_that_is_allowed(s3_env, bucket, caplog) -> None:
    with old.old_store(s3_env.endpoint_url, *old.CONDITIONS) as proxy:
        strict = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url))
        with pytest.raises(StorageError, match="two jobs could overwrite each other") as caught:
            strict.probe_writable()
        assert "storage.conditional_put: warn" in caught.value.remedy
        lenient = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url, conditional_put="warn"))
        assert lenient.probe_writable() == [CONDITIONS]
        assert "ignores conditional puts" in caplog.text and "one job at a time" in caplog.text
        assert lenient.list() == []


def test_a_weak_store_still_refuses_a_second_commit_when_it_is_looked_at(s3_env, bucket) -> None:
    with old.old_store(s3_env.endpoint_url, *old.CONDITIONS) as proxy:
        store = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url, conditional_put="warn"))
        store.put("blind", b"one", if_absent=True)
        store.put("blind", b"two", if_absent=True)
        assert store.get("blind") == b"two", "the store must be weak, or this test proves nothing"
        store.make_up_for(store.probe_writable())
        for other in (store, pickle.loads(pickle.dumps(store))):
            with pytest.raises(AlreadyExists):
                other.put("blind", b"three", if_absent=True)
        store.put("fresh", b"one", if_absent=True)
        assert store.get("blind") == b"two" and store.get("fresh") == b"one"


def test_a_put_that_lost_a_race_on_a_weak_store_is_told(s3_env, bucket, monkeypatch) -> None:
    """Another job's put arrives right after ours, which the look before it could not see."""
    with old.old_store(s3_env.endpoint_url, *old.CONDITIONS) as proxy:
        store = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url, conditional_put="warn"))
        store.make_up_for([CONDITIONS])
        direct = open_store(f"s3://{bucket}", S3Options(s3_env.endpoint_url))
        usual = store._connection.client.put_object

        def slow(**arguments):
            answer = usual(**arguments)
            direct.put("k", b"theirs")
            return answer

        monkeypatch.setattr(store._connection.client, "put_object", slow)
        with pytest.raises(AlreadyExists):
            store.put("k", b"ours", if_absent=True)


def test_a_store_that_accepts_damage_is_warned_about_and_read_back(s3_env, bucket, caplog) -> None:
    with old.old_store(s3_env.endpoint_url, *old.CHECKSUMS) as proxy:
        store = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url, **SMALL))
        assert store.probe_writable() == [CHECKSUMS]
        assert "read back and compared" in caplog.text
        proxy.seen.clear()
        store.put("k", b"x")
        assert [method for method, _ in proxy.seen] == ["PUT"]  # a process that was not told does not read back
        store.make_up_for([CHECKSUMS])
        store.put("k", b"x")
        assert [method for method, _ in proxy.seen] == ["PUT", "PUT", "GET"]


def is_second_part(method: str, path: str) -> bool:
    return method == "PUT" and "partNumber=2" in path


@pytest.mark.parametrize("size", [100, 12 * MIB])
def test_damage_that_the_store_accepted_is_found_and_removed(s3_env, bucket, size: int) -> None:
    body = random.Random(3).randbytes(size)

    def damages(method: str, path: str) -> bool:
        return is_second_part(method, path) or (method == "PUT" and "partNumber" not in path)

    with old.old_store(s3_env.endpoint_url, *old.CHECKSUMS, damages=damages) as proxy:
        for read_back in (False, True):
            store = open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url, read_back=read_back, **SMALL))
            told = pytest.raises(StorageError, match="other bytes than were written") if read_back else _nothing()
            with told as caught, store.writer("k") as out:
                out.write(body)
            if not read_back:
                assert store.get("k") != body, "the damage must happen, or this test proves nothing"
        assert f"bytes {5 * MIB if size > 5 * MIB else 0}.." in caught.value.where
        assert store.list() == []


def test_whole_uploads_pass_the_read_back(s3_env, bucket) -> None:
    store = open_store(f"s3://{bucket}", S3Options(s3_env.endpoint_url, read_back=True, **SMALL))
    body = random.Random(4).randbytes(12 * MIB)
    store.put("small", b"x", if_absent=True)
    with store.writer("k") as out:
        out.write(body)
    assert store.get("k") == body


def test_checksums_turned_off_count_as_a_weakness(s3_env, bucket, caplog) -> None:
    store = open_store(f"s3://{bucket}", S3Options(s3_env.endpoint_url, checksum="off"))
    assert store.probe_writable() == [CHECKSUMS]
    assert "storage.checksum is off" in caplog.text


def test_uploads_that_cannot_be_aborted_are_warned_about(s3_env, bucket, caplog) -> None:
    def is_abort(method: str, path: str) -> bool:
        return method == "DELETE" and "uploadId" in path

    with fault_proxy(s3_env.endpoint_url) as proxy:
        proxy.faults.append(Fault("busy", is_abort, times=100))
        assert open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url)).probe_writable() == [ABORTS]
    assert "AbortIncompleteMultipartUpload" in caplog.text


def test_a_store_whose_uploads_come_back_changed_is_refused(s3_env, bucket) -> None:
    with (
        old.old_store(s3_env.endpoint_url, *old.CHECKSUMS, damages=lambda _, path: "partNumber=1" in path) as proxy,
        pytest.raises(StorageError, match="an upload in parts returned other bytes"),
    ):
        open_store(f"s3://{bucket}", S3Options(proxy.endpoint_url)).probe_writable()
    with contextlib.closing(s3_env.client()) as client:
        assert "Contents" not in client.list_objects_v2(Bucket=bucket)


@contextlib.contextmanager
def _nothing():
    yield None

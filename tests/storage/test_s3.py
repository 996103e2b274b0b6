"""What only S3 has to prove: causes named within seconds, secrets kept, the requests that are sent."""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from raydz import log
from raydz.errors import StorageError
from raydz.storage import S3Options, StoreUnavailable, open_store
from raydz.storage.s3 import S3Store
from tests.support.fault_proxy import Fault, fault_proxy
from tests.support.seaweed import ACCESS_KEY, SECRET_KEY, SeaweedServer, free_ports

pytestmark = pytest.mark.s3

MIB = 1 << 20
PROBE_LIMIT_S = 10.0


@pytest.fixture
def options(s3_env: SeaweedServer) -> S3Options:
    return S3Options(endpoint_url=s3_env.endpoint_url)


@pytest.fixture
def bucket(s3_env: SeaweedServer) -> str:
    return s3_env.bucket()


@contextlib.contextmanager
def refused_within_seconds(*words: str) -> Iterator[None]:
    """The probe raises a `StorageError` with all the words, in time."""
    begin = time.monotonic()
    with pytest.raises(StorageError) as caught:
        yield
    assert time.monotonic() - begin < PROBE_LIMIT_S
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_missing_bucket_is_named(options: S3Options) -> None:
    with refused_within_seconds("bucket does not exist", "s3://no-such-bucket/runs", "NoSuchBucket"):
        open_store("s3://no-such-bucket/runs", options).probe_writable()


def test_a_wrong_secret_is_named(options: S3Options, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another")
    with refused_within_seconds("credentials are wrong", "SignatureDoesNotMatch"):
        open_store(f"s3://{bucket}", options).probe_writable()


def test_an_unknown_key_id_is_named(options: S3Options, bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAUNKNOWN")
    with refused_within_seconds("credentials are wrong", "InvalidAccessKeyId"):
        open_store(f"s3://{bucket}", options).probe_writable()


@pytest.mark.parametrize("metadata_disabled", ["true", "false"])
def test_missing_credentials_are_named(
    options: S3Options, bucket: str, monkeypatch: pytest.MonkeyPatch, metadata_disabled: str
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", metadata_disabled)
    with refused_within_seconds("no credentials were found", "AWS_ACCESS_KEY_ID"):
        open_store(f"s3://{bucket}", options).probe_writable()


def test_a_missing_profile_is_named(options: S3Options, bucket: str) -> None:
    with refused_within_seconds("the profile does not exist"):
        open_store(f"s3://{bucket}", replace(options, profile="nobody")).probe_writable()


def test_a_dead_endpoint_is_named(s3_env: SeaweedServer) -> None:
    url = f"http://127.0.0.1:{free_ports(1)[0]}"
    with refused_within_seconds("endpoint cannot be reached", "endpoint_url"):
        open_store("s3://bucket", S3Options(endpoint_url=url)).probe_writable()


def test_an_endpoint_that_never_answers_is_named(s3_env: SeaweedServer) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with refused_within_seconds("stopped answering"):
            open_store("s3://bucket", S3Options(endpoint_url=url)).probe_writable()


def test_a_certificate_nobody_vouches_for_is_named(s3_server_https: SeaweedServer, s3_env: SeaweedServer) -> None:
    with refused_within_seconds("certificate is not trusted", "AWS_CA_BUNDLE"):
        open_store("s3://bucket", S3Options(endpoint_url=s3_server_https.endpoint_url)).probe_writable()


def test_a_store_that_ignores_conditional_puts_is_refused(options: S3Options, bucket: str) -> None:
    with fault_proxy(options.endpoint_url) as proxy:
        proxy.faults.append(Fault("accept", lambda method, _: method == "PUT", times=100))
        with refused_within_seconds("two jobs could overwrite each other"):
            open_store(f"s3://{bucket}", S3Options(endpoint_url=proxy.endpoint_url)).probe_writable()
    assert open_store(f"s3://{bucket}", options).list() == []  # a failed probe cleans up too


def test_the_causes_survive_the_way_to_another_process(options: S3Options) -> None:
    with pytest.raises(StorageError) as caught:
        open_store("s3://no-such-bucket", options).list()
    copy = pickle.loads(pickle.dumps(caught.value))
    assert str(copy) == str(caught.value)
    assert not copy.retryable


def _failing_calls(store: S3Store) -> dict[str, Callable[[], object]]:
    def write() -> None:
        with store.writer("k") as out:
            out.write(bytes(6 * MIB))

    return {
        "put": lambda: store.put("k", b"x"),
        "get": lambda: store.get("k"),
        "read_into": lambda: store.read_into("k", 0, memoryview(bytearray(3))),
        "head": lambda: store.head("k"),
        "list": store.list,
        "list_folders": store.list_folders,
        "delete": lambda: store.delete(["k"]),
        "sweep": lambda: store.sweep(0),
        "writer": write,
        "probe": store.probe_writable,
    }


@pytest.mark.parametrize("token", [None, "tokenSECRETtoken", "tokenSECRETtoken\n"])
def test_no_secret_is_in_any_error_record_or_repr(
    options: S3Options,
    bucket: str,
    token: str | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With everything at DEBUG, wrong credentials, and a token that makes the HTTP library print its header."""
    secrets = ["wrongSECRETwrong", "AKIAWRONGKEYID", "tokenSECRETtoken", SECRET_KEY, ACCESS_KEY]
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secrets[0])
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", secrets[1])
    if token:
        monkeypatch.setenv("AWS_SESSION_TOKEN", token)
    caplog.set_level(logging.DEBUG)
    log.setup(0, logging.DEBUG)
    logging.getLogger("raydz").propagate = True
    quick = replace(options, max_attempts=1, part_bytes_min=5 * MIB, part_bytes_max=5 * MIB)
    store = open_store(f"s3://{bucket}", quick)
    store._connection.rounds = 1
    texts = [repr(store), repr(store.writer("k")), repr(options)]
    for call in _failing_calls(store).values():
        with pytest.raises(StorageError) as caught:
            call()
        texts += ["".join(traceback.format_exception(caught.value)), repr(caught.value)]
    for text in [*texts, caplog.text]:
        assert not [secret for secret in secrets if secret in text], text


def test_boto3_stays_silent_at_debug(
    options: S3Options, bucket: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    caplog.set_level(logging.DEBUG)
    open_store(f"s3://{bucket}", options).put("k", b"x")
    assert not [record for record in caplog.records if record.levelno < logging.INFO]


def test_a_forked_child_makes_its_own_client(options: S3Options, bucket: str) -> None:
    store = open_store(f"s3://{bucket}", options)
    store.put("k", b"parent")
    mine = store._connection.client
    context = multiprocessing.get_context("fork")
    answers = context.Queue()

    def child() -> None:
        answers.put((store._connection.client is mine, store.get("k")))

    with store._connection._lock:  # held by a thread that the child will not have
        process = context.Process(target=child)
        process.start()
    assert answers.get(timeout=20) == (False, b"parent")
    process.join()
    assert store._connection.client is mine


def test_path_style_is_chosen_for_endpoints_from_the_environment_too(
    s3_env: SeaweedServer, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_env.endpoint_url)
    monkeypatch.delenv("AWS_DEFAULT_REGION")
    open_store(f"s3://{bucket}").put("k", b"x")
    with contextlib.closing(s3_env.client()) as client:
        assert client.get_object(Bucket=bucket, Key="k")["Body"].read() == b"x"


def test_aws_gets_host_style_and_our_checksum_without_payload_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    connection = open_store("s3://bucket", S3Options(region="eu-central-1"))._connection
    assert connection.client.meta.config.s3 == {"addressing_style": "virtual", "payload_signing_enabled": False}
    assert connection.checksum.name == "crc64nvme"


def test_server_side_encryption_is_asked_for_in_puts_and_uploads(
    options: S3Options, bucket: str, s3_env: SeaweedServer
) -> None:
    small = replace(options, sse="AES256", part_bytes_min=5 * MIB, part_bytes_max=5 * MIB)
    store = open_store(f"s3://{bucket}", small)
    store.put("put", b"x")
    with store.writer("upload") as out:
        out.write(bytes(6 * MIB))
    with contextlib.closing(s3_env.client()) as client:
        for key in ("put", "upload"):
            assert client.head_object(Bucket=bucket, Key=key)["ServerSideEncryption"] == "AES256"


def test_list_reads_all_pages_and_delete_all_batches(options: S3Options, bucket: str, monkeypatch) -> None:
    monkeypatch.setattr("raydz.storage.s3.DELETE_BATCH", 3)
    store = open_store(f"s3://{bucket}/p", options)
    keys = [f"{number:02}" for number in range(8)]
    for key in keys:
        store.put(key, b"x")
    client = store._connection.client
    client.meta.events.register("provide-client-params.s3.ListObjectsV2", lambda params, **_: {**params, "MaxKeys": 3})
    assert store.list() == keys
    store.delete(keys)
    assert store.list() == []


def test_folder_markers_and_other_prefixes_are_not_listed(
    options: S3Options, bucket: str, s3_env: SeaweedServer
) -> None:
    with contextlib.closing(s3_env.client()) as client:
        for key in ("runs/a/k", "runs/ab/k", "runs/a/marker/"):
            client.put_object(Bucket=bucket, Key=key, Body=b"")
    assert open_store(f"s3://{bucket}/runs/a/", options).list() == ["k"]


def test_a_throttled_call_is_retryable(options: S3Options, bucket: str) -> None:
    with fault_proxy(options.endpoint_url) as proxy:
        store = open_store(f"s3://{bucket}", replace(options, endpoint_url=proxy.endpoint_url, max_attempts=1))
        store._connection.rounds = 1
        proxy.faults.append(Fault("busy", lambda *_: True))
        with pytest.raises(StoreUnavailable, match="throttling") as caught:
            store.put("k", b"x")
        assert caught.value.retryable
        store.put("k", b"x")


def test_sweep_aborts_only_old_uploads_below_the_prefix(options: S3Options, bucket: str, s3_env: SeaweedServer) -> None:
    with contextlib.closing(s3_env.client()) as client:
        for key in ("runs/a/torn", "runs/b/torn"):
            client.create_multipart_upload(Bucket=bucket, Key=key)
        store = open_store(f"s3://{bucket}/runs/a", options)
        assert store.sweep(older_than_s=3600) == 0
        assert store.sweep(older_than_s=0) == 1
        left = client.list_multipart_uploads(Bucket=bucket)["Uploads"]
    assert [upload["Key"] for upload in left] == ["runs/b/torn"]


def test_a_killed_upload_is_invisible_and_swept(options: S3Options, bucket: str) -> None:
    """The process dies without a chance to abort."""
    code = (
        "import os, sys; from raydz.storage import S3Options, open_store\n"
        "options = S3Options(endpoint_url=sys.argv[1], part_bytes_min=5 << 20, part_bytes_max=5 << 20)\n"
        "with open_store(sys.argv[2], options).writer('torn') as out:\n"
        "    out.write(bytes(11 << 20)); os.kill(os.getpid(), 9)"
    )
    uri = f"s3://{bucket}/runs"
    assert subprocess.run([sys.executable, "-c", code, options.endpoint_url, uri], check=False).returncode == -9
    store = open_store(uri, options)
    assert store.list() == []
    assert store.sweep(0) == 1
    assert store.sweep(0) == 0

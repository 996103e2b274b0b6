"""Stores share a boto3 client where they would make equal ones, and nowhere else."""

import os
import time

import pytest

from raydz.storage import S3Options
from raydz.storage.s3_client import S3Connection

OPTIONS = S3Options(endpoint_url="http://127.0.0.1:9", region="us-east-1")


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "first")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")


def client(options: S3Options = OPTIONS):
    return S3Connection(options).client


def test_equal_options_share_a_client() -> None:
    assert client() is client(S3Options(endpoint_url="http://127.0.0.1:9", region="us-east-1"))


def test_other_options_do_not() -> None:
    assert client() is not client(S3Options(endpoint_url="http://127.0.0.1:9", region="us-east-1", max_attempts=7))


def test_other_credentials_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    before = client()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "second")
    assert client()._request_signer._credentials.access_key == "second"
    assert before._request_signer._credentials.access_key == "first"


def test_a_changed_credentials_file_is_read_again(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    place = tmp_path / "credentials"
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(place))
    found = []
    for name in ("old", "newer"):
        place.write_text(f"[default]\naws_access_key_id = {name}\naws_secret_access_key = x\n")
        found.append(client()._request_signer._credentials.access_key)
        time.sleep(0.01)
    assert found == ["old", "newer"]


def test_a_fork_makes_its_own() -> None:
    mine = client()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(write, b"same" if client() is mine else b"own")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"own"

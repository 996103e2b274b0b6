"""URIs and options: what is refused before anything is contacted, and that no secret comes in or out."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest

from raydz.errors import ConfigError, StorageError
from raydz.storage import S3Options, open_store

SECRET = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY"


@pytest.mark.parametrize("uri", ["gs://bucket/x", "s3://", "s3:///prefix", "", "file://host/x", "http://x/y"])
def test_a_uri_of_another_kind_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError):
        open_store(uri)


@pytest.mark.parametrize("uri", [f"s3://AKIA:{SECRET}@bucket/x", f"s3://AKIA:{SECRET}@/x", f"gs://AKIA:{SECRET}@b/x"])
def test_credentials_in_a_uri_are_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "AKIA" not in str(caught.value)
    assert not any(piece in str(caught.value) for piece in SECRET.split("/"))


@pytest.mark.parametrize("url", [f"https://AKIA:{SECRET.replace('/', '')}@host", f"https://host/?secret={SECRET}"])
def test_credentials_in_an_endpoint_are_refused_and_not_repeated(url: str) -> None:
    with pytest.raises(ConfigError) as caught:
        S3Options(endpoint_url=url)
    assert SECRET[:8] not in str(caught.value)


@pytest.mark.parametrize("name", ["AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"])
def test_credentials_in_an_endpoint_of_the_environment_are_refused_too(name: str, monkeypatch) -> None:
    monkeypatch.setenv(name, f"http://AKIA:{SECRET.replace('/', '')}@127.0.0.1:1")
    with pytest.raises(ConfigError, match="credentials in an endpoint") as caught:
        open_store("s3://bucket/x").probe_writable()
    assert SECRET[:8] not in str(caught.value)


def test_no_option_can_hold_a_key() -> None:
    names = {field.name for field in dataclasses.fields(S3Options)}
    assert not {name for name in names if "secret" in name or "access" in name or "token" in name}
    with pytest.raises(TypeError):
        S3Options(aws_secret_access_key=SECRET)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("endpoint_url", "127.0.0.1:8333"),
        ("endpoint_url", "ftp://host"),
        ("checksum", "md5"),
        ("path_style", "sometimes"),
        ("concurrency", 0),
        ("max_attempts", 0),
        ("read_timeout_s", -1.0),
        ("part_bytes_min", 1 << 20),
        ("part_bytes_max", 1 << 20),
        ("bandwidth_limit", 0.0),
        ("read_back", "never"),
        ("conditional_put", "ignore"),
        ("sse_kms_key_id", "a-key-without-aws:kms"),
    ],
)
def test_an_impossible_option_is_named(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match="impossible storage option") as caught:
        S3Options(**{field: value})
    assert "storage." in caught.value.where


@pytest.mark.parametrize("prefix", ["../x", "a//b", "a/./b"])
def test_a_prefix_that_is_no_key_is_refused(prefix: str) -> None:
    with pytest.raises(StorageError, match="not a key"):
        open_store(f"s3://bucket/{prefix}")


def test_boto3_is_imported_by_the_first_client_and_not_before() -> None:
    code = "import sys; from raydz.storage import open_store; open_store('s3://b/x'); print('boto3' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"

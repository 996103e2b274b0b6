"""Answers that the test server cannot be made to give: S3's documented codes, and what only a proxy would say."""

from __future__ import annotations

import pytest
from botocore import exceptions
from botocore.exceptions import ClientError

from raydz.errors import StorageError
from raydz.storage import NotFound, ObjectChanged, StoreUnavailable
from raydz.storage.s3_errors import s3_errors


def answer(code: str, status: int) -> ClientError:
    """An error as boto3 makes it, with text in it that must not be passed on."""
    return ClientError(
        {
            "Error": {"Code": code, "Message": "AKIASECRET", "StringToSign": "AKIASECRET"},
            "ResponseMetadata": {"HTTPStatusCode": status, "RequestId": "R1", "HTTPHeaders": {}, "RetryAttempts": 0},
        },
        "PutObject",
    )


@pytest.mark.parametrize(
    ("code", "status", "kind", "words"),
    [
        ("NoSuchBucket", 404, StorageError, "bucket does not exist"),
        ("NoSuchKey", 404, NotFound, "no such object"),
        ("404", 404, NotFound, "no such object"),
        ("AccessDenied", 403, StorageError, "not allowed"),
        ("403", 403, StorageError, "not allowed"),
        ("ExpiredToken", 400, StoreUnavailable, "expired"),
        ("RequestTimeTooSkewed", 403, StorageError, "clock"),
        ("PermanentRedirect", 301, StorageError, "another region"),
        ("412", 412, ObjectChanged, "replaced"),
        ("SlowDown", 503, StoreUnavailable, "throttling"),
        ("InternalError", 500, StoreUnavailable, "throttling"),
        ("SomethingNew", 599, StoreUnavailable, "throttling"),
        ("ConditionalRequestConflict", 409, StoreUnavailable, "another writer"),
        ("BadDigest", 400, StoreUnavailable, "damaged"),
        ("NotImplemented", 501, StorageError, "does not know this operation"),
        ("SomethingNew", 400, StorageError, "refused the request"),
    ],
)
def test_a_code_becomes_a_cause(code: str, status: int, kind: type[StorageError], words: str) -> None:
    with pytest.raises(StorageError, match=words) as caught, s3_errors("s3://bucket/key"):
        raise answer(code, status)
    assert type(caught.value) is kind
    for part in ("s3://bucket/key", code, str(status), "R1"):
        assert part in str(caught.value)
    assert "AKIASECRET" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (exceptions.EndpointConnectionError(endpoint_url="u"), StoreUnavailable, "cannot be reached"),
        (exceptions.ConnectTimeoutError(endpoint_url="u"), StoreUnavailable, "cannot be reached"),
        (exceptions.ConnectionClosedError(endpoint_url="u"), StoreUnavailable, "broke off"),
        (exceptions.IncompleteReadError(actual_bytes=1, expected_bytes=2), StoreUnavailable, "broke off"),
        (exceptions.ResponseStreamingError(error="e"), StoreUnavailable, "broke off"),
        (exceptions.FlexibleChecksumError(error_msg="e"), StoreUnavailable, "damaged"),
        (exceptions.SSLError(endpoint_url="u", error="e"), StorageError, "certificate"),
        (exceptions.NoRegionError(), StorageError, "no region"),
        (exceptions.CredentialRetrievalError(provider="p", error_msg="e"), StorageError, "no credentials"),
        (exceptions.ParamValidationError(report="r"), StorageError, "could not be made"),
        (ConnectionResetError(104, "reset"), StoreUnavailable, "broke off"),
        (ValueError("Invalid endpoint"), StorageError, "could not be made"),
    ],
)
def test_an_exception_becomes_a_cause(error: Exception, kind: type[StorageError], words: str) -> None:
    with pytest.raises(StorageError, match=words) as caught, s3_errors("s3://bucket"):
        raise error
    assert type(caught.value) is kind


def test_errors_of_raydz_and_interrupts_pass_unchanged() -> None:
    for error in (NotFound("mine"), KeyboardInterrupt()):
        with pytest.raises(type(error)) as caught, s3_errors("s3://bucket"):
            raise error
        assert caught.value is error

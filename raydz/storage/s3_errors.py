"""The one place where errors of boto3 become errors of raydz.

Neighbours: every call in `s3`, `s3_reader` and `s3_writer` stands inside `s3_errors`. Messages of boto3 are never
passed on, and the chain is cut: an HTTP library that dislikes a header prints it, session token included.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from raydz.errors import RaydzError, StorageError
from raydz.storage.store import NotFound, ObjectChanged, StoreUnavailable

_CHECK_KEYS = "check AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, the profile, or the role of this machine"
_CHECK_ENDPOINT = "check storage.endpoint_url, the network and the proxy settings"
_CHECK_CHECKSUM = "if it goes on, the store or a proxy changes data, or does not know this checksum: storage.checksum"

_Answer = tuple[type[StorageError], str, str | None]

_WRONG_KEYS: _Answer = (StorageError, "the credentials are wrong", _CHECK_KEYS)
_FORBIDDEN: _Answer = (
    StorageError,
    "the credentials are not allowed to do this",
    "grant s3:GetObject, PutObject, DeleteObject, AbortMultipartUpload and ListBucket on this bucket and prefix; "
    "a wrong secret and, without ListBucket, a missing object may look the same",
)
_EXPIRED: _Answer = (StoreUnavailable, "the credentials have expired", "use a role that boto3 can refresh by itself")
_NO_KEY: _Answer = (NotFound, "no such object", None)
_CHANGED: _Answer = (ObjectChanged, "the object was replaced since its etag was taken", None)
_BUSY: _Answer = (StoreUnavailable, "the store is throttling or failing", "lower storage.concurrency if it goes on")
_DAMAGED: _Answer = (StoreUnavailable, "bytes were damaged on the way", _CHECK_CHECKSUM)
_UNREACHABLE: _Answer = (StoreUnavailable, "the endpoint cannot be reached", _CHECK_ENDPOINT)
_BROKEN_OFF: _Answer = (StoreUnavailable, "the connection broke off", _CHECK_ENDPOINT)
_REGION: _Answer = (StorageError, "the bucket lives in another region", "set storage.region to the bucket's region")
_NO_CREDENTIALS: _Answer = (StorageError, "no credentials were found", _CHECK_KEYS)
_NOT_IMPLEMENTED: _Answer = (
    StorageError,
    "the store does not know this operation",
    "use a store with conditional puts and multipart uploads; storage.checksum: off helps with old ones",
)

_BY_CODE: dict[str, _Answer] = {
    "NoSuchBucket": (StorageError, "the bucket does not exist", "create it, or correct its name"),
    **dict.fromkeys(("NoSuchKey", "404"), _NO_KEY),
    **dict.fromkeys(("InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "InvalidSecurity"), _WRONG_KEYS),
    **dict.fromkeys(("AccessDenied", "AllAccessDisabled", "403", "401"), _FORBIDDEN),
    **dict.fromkeys(("ExpiredToken", "ExpiredTokenException", "TokenRefreshRequired", "RequestExpired"), _EXPIRED),
    **dict.fromkeys(("PreconditionFailed", "412"), _CHANGED),
    **dict.fromkeys(("PermanentRedirect", "AuthorizationHeaderMalformed", "IllegalLocationConstraint", "301"), _REGION),
    **dict.fromkeys(("BadDigest", "InvalidDigest", "XAmzContentChecksumMismatch", "IncompleteBody"), _DAMAGED),
    **dict.fromkeys(("SlowDown", "RequestTimeout", "Throttling", "OperationAborted", "429"), _BUSY),
    **dict.fromkeys(("NotImplemented", "MethodNotAllowed", "405", "501"), _NOT_IMPLEMENTED),
    "ConditionalRequestConflict": (StoreUnavailable, "another writer is putting the same key", None),
    "NoSuchUpload": (StorageError, "the upload was aborted by someone else", "look at the bucket's lifecycle rules"),
    "RequestTimeTooSkewed": (StorageError, "the clock of this machine is wrong", "synchronise it (NTP)"),
}

# By class name along the inheritance, so that this module works before boto3 is imported.
_BY_CLASS: dict[str, _Answer] = {
    "SSLError": (
        StorageError,
        "the endpoint's certificate is not trusted",
        "set AWS_CA_BUNDLE to the certificate of the authority that signed it",
    ),
    **dict.fromkeys(("NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError"), _NO_CREDENTIALS),
    **dict.fromkeys(
        ("NoAuthTokenError", "TokenRetrievalError", "SSOError", "RefreshWithMFAUnsupportedError"), _EXPIRED
    ),
    "ProfileNotFound": (StorageError, "the profile does not exist", "correct storage.profile"),
    "NoRegionError": (StorageError, "no region is set", "set storage.region or AWS_DEFAULT_REGION"),
    "EndpointConnectionError": _UNREACHABLE,
    "ConnectTimeoutError": _UNREACHABLE,
    "ProxyConnectionError": _UNREACHABLE,
    "FlexibleChecksumError": _DAMAGED,
    "IncompleteReadError": _BROKEN_OFF,
    "ReadTimeoutError": (StoreUnavailable, "the endpoint stopped answering", _CHECK_ENDPOINT),
    "HTTPClientError": _BROKEN_OFF,
    "HTTPError": _BROKEN_OFF,
    "ConnectionError": _BROKEN_OFF,
    "TimeoutError": _BROKEN_OFF,
}


@contextmanager
def s3_errors(where: str) -> Iterator[None]:
    """Raise whatever boto3 raises inside as a `StorageError` about `where`."""
    from botocore.exceptions import BotoCoreError, ClientError
    from urllib3.exceptions import HTTPError

    try:
        yield
    except RaydzError:
        raise
    except (BotoCoreError, ClientError, HTTPError, OSError, ValueError) as error:
        raise translate(error, where) from None


def translate(error: Exception, where: str) -> StorageError:
    """The error in our words: cause, code and remedy, without any text that the store or boto3 wrote."""
    response: dict[str, Any] | None = getattr(error, "response", None)
    if response is not None:
        metadata = response.get("ResponseMetadata", {})
        code = str(response.get("Error", {}).get("Code", ""))
        return from_code(code, where, int(metadata.get("HTTPStatusCode", 0)), metadata.get("RequestId"))
    for cls in type(error).__mro__:
        if cls.__name__ in _BY_CLASS:
            kind, what, remedy = _BY_CLASS[cls.__name__]
            return kind(what, where=where, got=type(error).__name__, remedy=remedy)
    return StorageError("the request could not be made", where=where, got=type(error).__name__, remedy=_CHECK_ENDPOINT)


def from_code(code: str, where: str, status: int = 0, request_id: str | None = None) -> StorageError:
    """The error for a code of the S3 protocol, or for the HTTP status if the code says nothing."""
    answer = _BY_CODE.get(code) or _BY_CODE.get(str(status))
    if answer is None:
        is_busy = status >= 500 or code in ("InternalError", "ServiceUnavailable")
        answer = _BUSY if is_busy else (StorageError, "the store refused the request", None)
    kind, what, remedy = answer
    details = [f"HTTP {status}"] * bool(status) + [f"request {request_id}"] * bool(request_id)
    got = f"{code} ({', '.join(details)})" if details else code
    return kind(what, where=where, got=got, remedy=remedy)

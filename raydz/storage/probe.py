"""The self-test of a store at the start of a run: cheap, and it names the cause when something is wrong.

Neighbours: `LocalStore.probe_writable` and `S3Store.probe_writable` call it, before the first step is trained;
`s3_probe` tries what only S3 has. See the note "Weak stores" in README.md.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable
from contextlib import suppress

from raydz import log
from raydz.errors import StorageError
from raydz.storage.store import AlreadyExists, Store, StoreUnavailable

CONDITIONS = "conditional puts"
"""Weakness: a conditional put replaces what is there."""

CHECKSUMS = "checksums"
"""Weakness: bytes that do not fit their checksum are accepted."""

ABORTS = "aborted uploads"
"""Weakness: an aborted upload stays, or uploads cannot be listed."""

_BODY = b"raydz was here"
_REMEDY = "use a store with conditional puts: AWS S3, SeaweedFS 4, Ceph 16 or later, or a shared file system"
_WARNINGS = {
    CONDITIONS: "%s ignores conditional puts: raydz looks before it commits a checkpoint, but two jobs of one run.name "
    "at the same moment may overwrite each other's manifest. Be sure that one job at a time writes there",
    CHECKSUMS: "%s accepts bytes that do not fit their checksum (or storage.checksum is off): everything written is "
    "read back and compared, which doubles the traffic; storage.read_back: false turns that off",
    ABORTS: "%s does not let go of aborted uploads, which are paid for: give the bucket a lifecycle rule "
    "AbortIncompleteMultipartUpload",
}
_logger = log.get(__name__)


def probe(store: Store, *, requires_conditions: bool = True) -> bool:
    """Put, read, read a range, refuse a second put, delete: one tiny object under a name of its own.

    Returns:
        Whether a second conditional put was refused; True where `requires_conditions`.

    Raises:
        StorageError: what the store did wrong, or the error of the step that failed.
    """
    key = f"raydz-probe-{uuid.uuid4().hex}"
    store.put(key, _BODY, if_absent=requires_conditions)
    try:
        _check_reads(store, key)
        has_conditions = _refuses(store, key, requires_conditions)
    except BaseException:
        with suppress(StorageError):  # must not hide the cause
            store.delete([key])
        raise
    store.delete([key])
    return has_conditions


def warn_of(weaknesses: Iterable[str], uri: str) -> None:
    """Say each weakness once, loudly, with what it costs."""
    for weakness in weaknesses:
        _logger.warning(_WARNINGS[weakness], uri)


def _check_reads(store: Store, key: str) -> None:
    for start, stop in ((None, None), (2, 5)):
        if (body := store.get(key, start, stop)) != _BODY[start:stop]:
            raise StorageError(
                "the store cannot be used: it returned other bytes than were written",
                where=f"{store.uri}, bytes {start}..{stop} of {key}",
                got=body[:64],
                wanted=_BODY[start:stop],
            )


def _refuses(store: Store, key: str, requires_conditions: bool) -> bool:
    try:
        store.put(key, b"a second job", if_absent=True)
    except AlreadyExists:
        return True
    except StoreUnavailable:
        raise
    except StorageError:  # some answer that they have no such operation
        if requires_conditions:
            raise
    if requires_conditions:
        raise StorageError(
            "the store cannot be used: two jobs could overwrite each other",
            where=store.uri,
            got="a conditional put replaced an object that was there",
            wanted="a refusal (HTTP 412 for 'If-None-Match: *')",
            remedy=f"{_REMEDY}; or storage.conditional_put: warn, where one job at a time writes",
        )
    return False

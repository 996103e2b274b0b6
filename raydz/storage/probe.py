"""The self-test of a store at the start of a run: cheap, and it names the cause when something is wrong.

Neighbours: `LocalStore.probe_writable` and `S3Store.probe_writable` call it, before the first step is trained.
"""

from __future__ import annotations

import uuid
from contextlib import suppress

from raydz.errors import StorageError
from raydz.storage.store import AlreadyExists, Store

_BODY = b"raydz was here"


def probe(store: Store) -> None:
    """Put, read, read a range, refuse a second put, delete: one tiny object under a name of its own.

    Raises:
        StorageError: what the store did wrong, or the error of the step that failed.
    """
    key = f"raydz-probe-{uuid.uuid4().hex}"
    store.put(key, _BODY, if_absent=True)
    try:
        _check_reads(store, key)
        _check_refusal(store, key)
    except BaseException:
        with suppress(StorageError):  # must not hide the cause
            store.delete([key])
        raise
    store.delete([key])


def _check_reads(store: Store, key: str) -> None:
    for start, stop in ((None, None), (2, 5)):
        if (body := store.get(key, start, stop)) != _BODY[start:stop]:
            raise StorageError(
                "the store cannot be used: it returned other bytes than were written",
                where=f"{store.uri}, bytes {start}..{stop} of {key}",
                got=body[:64],
                wanted=_BODY[start:stop],
            )


def _check_refusal(store: Store, key: str) -> None:
    try:
        store.put(key, b"a second job", if_absent=True)
    except AlreadyExists:
        return
    raise StorageError(
        "the store cannot be used: two jobs could overwrite each other",
        where=store.uri,
        got="a conditional put replaced an object that was there",
        wanted="a refusal (HTTP 412 for 'If-None-Match: *')",
        remedy="use a store with conditional puts: AWS S3, SeaweedFS 4, Ceph 16 or later, or a shared file system",
    )

"""Local files and S3 behind one protocol: atomic puts, bounded-memory writers, ranged reads.

    store = open_store("s3://bucket/runs/a")
    store.probe_writable()
    with store.writer("step-10/rank0.bin", expected_bytes=total) as out:
        out.write(piece)
    store.put("step-10/manifest.json", manifest, if_absent=True)

Neighbours: `checkpoint/` and `data/` call `open_store`; `store.py` has the protocol, README.md the notes. boto3 is
imported when the first S3 client is made, never before.
"""

from __future__ import annotations

from urllib.parse import unquote

from raydz.errors import ConfigError
from raydz.storage.local import LocalStore
from raydz.storage.options import CREDENTIALS_REMEDY, S3Options
from raydz.storage.s3 import S3Store
from raydz.storage.store import (
    AlreadyExists,
    Buffer,
    NotFound,
    ObjectChanged,
    ObjectInfo,
    Store,
    StoredObject,
    StoreUnavailable,
    Writer,
)

__all__ = [
    "AlreadyExists",
    "Buffer",
    "NotFound",
    "ObjectChanged",
    "ObjectInfo",
    "S3Options",
    "Store",
    "StoreUnavailable",
    "StoredObject",
    "Writer",
    "open_store",
]


def open_store(uri: str, options: S3Options | None = None) -> Store:
    """The store at `s3://bucket/prefix`, `file:///x`, `/x` or a relative path; nothing is contacted yet.

    Raises:
        ConfigError: another scheme, no bucket, or credentials inside the URI.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator:
        return LocalStore(_not_empty(uri, uri))
    if scheme == "s3":
        bucket, _, prefix = rest.partition("/")
        if "@" in bucket or ":" in bucket:
            raise ConfigError("credentials in a URI", where="s3://(hidden)", remedy=CREDENTIALS_REMEDY)
        return S3Store(_not_empty(bucket, uri), prefix.strip("/"), options or S3Options())
    if scheme == "file" and rest.startswith(("/", "localhost/")):
        return LocalStore(unquote(rest.removeprefix("localhost")))
    # Only the scheme is repeated: the rest may hold a password.
    raise ConfigError(
        "not a place to store things", got=f"{scheme}://...", wanted="s3://bucket/prefix, file:///path or a path"
    )


def _not_empty(name: str, uri: str) -> str:
    if not name:
        raise ConfigError("a storage URI without a name", got=repr(uri), wanted="s3://bucket/prefix or a path")
    return name

"""One boto3 client for all stores of a process that would make equal ones.

Making a client takes 0.1 s of a core and leaves 30,000 objects in cycles, which Python's collector then walks for
0.3 s: more than reading a small checkpoint takes. Neighbours: `s3_client.py` asks.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raydz.storage.options import S3Options

_MOST_CLIENTS = 8
_Key = tuple[Any, ...]
_clients: dict[_Key, Any] = {}
_lock = threading.Lock()


def shared_client(options: S3Options, make: Callable[[], Any]) -> Any:
    """The client that an equal call got before, or what `make` makes.

    Equal are calls of one process with the same options, AWS variables, and files of profiles and credentials.
    """
    key = (options, _surroundings())
    with _lock:
        client = _clients.get(key)
        if client is None:
            client = _clients[key] = make()
            while len(_clients) > _MOST_CLIENTS:
                del _clients[next(iter(_clients))]  # whoever holds it goes on with it
        return client


def _after_fork() -> None:
    """The parent's lock may be held by a thread that does not exist here; its clients have its sockets."""
    global _lock
    _lock = threading.Lock()
    _clients.clear()


os.register_at_fork(after_in_child=_after_fork)


def _surroundings() -> _Key:
    """What boto3 would find other credentials or another endpoint in."""
    variables = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
    files = (
        os.environ.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        os.environ.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return (variables, *(_version(Path(name).expanduser()) for name in files))


def _version(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size

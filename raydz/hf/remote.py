"""Checkpoints of torch's own files on an object store: copied to this host first, since their loader maps files.

Neighbours: `detect.py` asks which files and opens the copy. Only what belongs to one checkpoint is copied, and it is
gone with the source that reads it.
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from raydz.errors import CheckpointError
from raydz.hf.source import Source
from raydz.storage import Store, StoredObject
from raydz.units import format_bytes

_THREADS = 8
_READ_BYTES = 16 << 20
_LATEST = ("latest", "latest_universal")


def checkpoint_objects(store: Store, metadata: str, is_checkpoint_file: Callable[[str], bool]) -> list[StoredObject]:
    """The files of the one checkpoint that lies here, or of the tag that `latest` names; [] where there is none.

    Args:
        metadata: the name of DCP's.
        is_checkpoint_file: whether a file of this name makes its folder one of DeepSpeed's.
    """
    objects = store.list_objects()
    names = {each.key: each for each in objects}
    if metadata in names:
        return objects
    for name in _LATEST:
        if name in names:
            tag = store.get(name).decode(errors="replace").strip()
            if tag and "/" not in tag and tag not in (".", ".."):
                found = [each for each in objects if each.key.startswith(f"{tag}/")]
                if any(is_checkpoint_file(each.key.partition("/")[2]) for each in found):
                    return [names[name], *found]
    return objects if any(is_checkpoint_file(key) for key in names) else []


@contextmanager
def local_copy(store: Store, objects: list[StoredObject], scratch: str | None) -> Iterator[Path]:
    """Copy the objects into a new folder; on an exception it is removed, else `kept_with` decides how long it stays.

    Args:
        scratch: where; None is the system's place for temporary files.

    Raises:
        CheckpointError: the place has not got the room, or is none.
        StorageError: the store failed, or an object changed meanwhile.
    """
    place = Path(scratch or tempfile.gettempdir())
    total = sum(each.bytes for each in objects)
    try:
        free = shutil.disk_usage(place).free
        folder = Path(tempfile.mkdtemp(prefix="raydz-convert-", dir=place)) if free > total else None
    except OSError as error:
        raise CheckpointError("no place for the copy of the source", where=str(place), got=error) from None
    if folder is None:
        raise CheckpointError(
            "no room for the copy of the source, whose files torch can only read here", where=str(place),
            got=f"{format_bytes(free)} free", wanted=f"{format_bytes(total)} for {store.uri}",
            remedy="name a larger place with --scratch",
        )  # fmt: skip
    try:
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="raydz-fetch") as pool:
            list(pool.map(lambda each: _fetch(store, each, folder), objects))
        yield folder
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def kept_with(source: Source, folder: Path) -> Source:
    """Remove the folder when nobody holds the source any more, at the latest with the process."""
    weakref.finalize(source, shutil.rmtree, folder, ignore_errors=True)
    return source


def _fetch(store: Store, item: StoredObject, folder: Path) -> None:
    """One object by ranged reads of one version of it. Memory: `_READ_BYTES`."""
    parts = PurePosixPath(item.key).parts
    found = store.head(item.key)
    if ".." in parts or found is None or found.bytes != item.bytes:
        raise CheckpointError(
            "a file of the source is gone or has changed", where=f"{store.uri}/{item.key}",
            got=found and f"{found.bytes} bytes", wanted=f"{item.bytes} bytes",
        )  # fmt: skip
    path = folder.joinpath(*parts)
    path.parent.mkdir(parents=True, exist_ok=True)
    buffer = bytearray(min(_READ_BYTES, item.bytes))
    with path.open("wb") as out:
        for start in range(0, item.bytes, _READ_BYTES):
            view = memoryview(buffer)[: min(_READ_BYTES, item.bytes - start)]
            store.read_into(item.key, start, view, if_match=found.etag)
            out.write(view)

"""Reading a checkpoint whole and comparing every checksum, without an engine.

Neighbours: `raydz checkpoint verify` reports what this finds; `copy.py` reads through `checked_blocks` as well. A load
checks only the chunks it reads, and ends at the first that does not fit; this looks at all and names all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from raydz.checkpoint.checksums import crc_function
from raydz.checkpoint.find import checkpoint_uri, join_key
from raydz.checkpoint.manifest import DataFile, Manifest
from raydz.storage import Store

THREADS = 8
"""Reads in flight of one checkpoint."""

_BLOCK_BYTES = 8 << 20

Done = Callable[[int], None]
"""Told how many more bytes have been dealt with, from any thread."""


@dataclass(frozen=True)
class Damage:
    """What is wrong with one data file. `chunks`: numbers of those whose checksum does not fit."""

    file: str
    what: str
    chunks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Block:
    """Whole chunks of a data file from byte `start` on, and the numbers of those that are damaged."""

    start: int
    data: bytearray
    damaged: tuple[int, ...]


def verify_checkpoint(
    store: Store, folder: str, manifest: Manifest, *, quick: bool = False, threads: int = THREADS,
    done: Done = lambda num_bytes: None,
) -> list[Damage]:  # fmt: skip
    """Look at every data file; what is damaged, in the order of the manifest. The manifest itself is good already.

    Args:
        quick: existence and sizes alone.

    Memory: `threads` + 1 blocks of 8 MiB for each file that is read.

    Raises:
        StorageError: the store cannot be read.
        CheckpointError: checksums of a kind that this installation does not know.
    """
    ahead = max(1, threads // max(1, len(manifest.files)))

    def look(data_file: DataFile) -> Damage | None:
        return verify_file(store, folder, data_file, quick=quick, ahead=ahead, done=done)

    with ThreadPoolExecutor(threads, thread_name_prefix="raydz-verify") as pool:
        return [damage for damage in pool.map(look, manifest.files) if damage]


def verify_file(
    store: Store, folder: str, data_file: DataFile, *, quick: bool = False, ahead: int = 1,
    done: Done = lambda num_bytes: None,
) -> Damage | None:  # fmt: skip
    """What is wrong with a data file, or None."""
    found = store.head(join_key(folder, data_file.path))
    if found is None:
        return Damage(data_file.path, "is missing")
    if found.bytes != data_file.bytes:
        return Damage(data_file.path, f"has {found.bytes} bytes instead of {data_file.bytes}")
    if quick:
        return None
    crc = crc_function(data_file.algorithm, f"{checkpoint_uri(store, folder)}: {data_file.path}")
    whole, damaged = 0, list[int]()
    for block in checked_blocks(store, folder, data_file, found.etag, ahead):
        whole = crc(block.data, whole)
        damaged += block.damaged
        done(len(block.data))
    if damaged:
        count = f"{len(damaged)} of {len(data_file.chunk_crcs)}"
        return Damage(data_file.path, f"is damaged in {count} chunks of {data_file.chunk_bytes} bytes", tuple(damaged))
    if whole != data_file.crc:
        return Damage(data_file.path, "does not fit the checksum of the whole file, though every chunk fits its own")
    return None


def checked_blocks(store: Store, folder: str, data_file: DataFile, etag: str, ahead: int = 1) -> Iterator[Block]:
    """A data file from its beginning to its end, in blocks of whole chunks, all from the version `etag`.

    Args:
        ahead: blocks that are read at the same time.
    """
    key = join_key(folder, data_file.path)
    crc = crc_function(data_file.algorithm, f"{checkpoint_uri(store, folder)}: {data_file.path}")
    chunk_bytes = data_file.chunk_bytes
    step = max(1, _BLOCK_BYTES // chunk_bytes) * chunk_bytes

    def read(start: int) -> Block:
        data = bytearray(min(step, data_file.bytes - start))
        store.read_into(key, start, memoryview(data), if_match=etag)
        view = memoryview(data)
        damaged = tuple(
            (start + low) // chunk_bytes
            for low in range(0, len(data), chunk_bytes)
            if crc(view[low : low + chunk_bytes], 0) != data_file.chunk_crcs[(start + low) // chunk_bytes]
        )
        return Block(start, data, damaged)

    with ThreadPoolExecutor(ahead, thread_name_prefix="raydz-verify-read") as pool:
        waiting: deque[Future[Block]] = deque()
        try:
            for start in range(0, data_file.bytes, step):
                waiting.append(pool.submit(read, start))
                if len(waiting) > ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)

"""Copying a checkpoint from one store to another: data first, each chunk checked on the way, the manifest last.

Neighbours: `raydz checkpoint cp` calls this; `verify.py` reads. Killed anywhere, the target has no checkpoint yet, and
the same call goes on with the files that are missing.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from raydz.checkpoint.find import checkpoint_uri, join_key
from raydz.checkpoint.manifest import MANIFEST_NAME, DataFile, Manifest
from raydz.checkpoint.verify import THREADS, Done, checked_blocks, verify_checkpoint, verify_file
from raydz.errors import CheckpointError
from raydz.storage import AlreadyExists, Store


@dataclass(frozen=True)
class Place:
    """A checkpoint's folder in a store; there need not be anything yet."""

    store: Store
    folder: str = ""

    @property
    def uri(self) -> str:
        """For people."""
        return checkpoint_uri(self.store, self.folder)

    @property
    def manifest_key(self) -> str:
        """Key of the manifest."""
        return join_key(self.folder, MANIFEST_NAME)


@dataclass(frozen=True)
class Copied:
    """What a copy did: files that were copied, and those that were there, whole, from an earlier try."""

    uri: str
    num_copied: int
    num_kept: int
    num_bytes: int


def copy_checkpoint(
    source: Place, target: Place, *, threads: int = THREADS, done: Done = lambda num_bytes: None
) -> Copied:
    """Copy a committed checkpoint; at the end the target holds the same bytes, manifest included.

    Memory: as for `verify.verify_checkpoint`, and what the target's writers hold.

    Raises:
        CheckpointError: the source is damaged (names file and chunk; the target then has no manifest), or another
            checkpoint is at the target.
        StorageError: a store failed; the same call goes on where this one ended.
    """
    data = source.store.get(source.manifest_key)
    manifest = Manifest.from_bytes(data, f"{source.store.uri}/{source.manifest_key}")
    _refuse_other(target, data)
    ahead = max(1, threads // max(1, len(manifest.files)))

    def copy(data_file: DataFile) -> bool:
        return _copy_file(source, target, data_file, ahead, done)

    with ThreadPoolExecutor(threads, thread_name_prefix="raydz-copy") as pool:
        futures = [pool.submit(copy, data_file) for data_file in manifest.files]
        try:
            copied = sum(future.result() for future in futures)
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    _commit(target, manifest, data)
    num_bytes = sum(data_file.bytes for data_file in manifest.files)
    return Copied(target.uri, copied, len(manifest.files) - copied, num_bytes)


def _refuse_other(target: Place, data: bytes) -> None:
    if target.store.exists(target.manifest_key) and target.store.get(target.manifest_key) != data:
        raise CheckpointError(
            "another checkpoint is there", where=target.uri, wanted="an empty place, or an earlier copy of this one",
            remedy="nothing is overwritten: copy to another name, or delete that one first",
        )  # fmt: skip


def _copy_file(source: Place, target: Place, data_file: DataFile, ahead: int, done: Done) -> bool:
    """Whether it had to be copied."""
    there = target.store.head(join_key(target.folder, data_file.path))
    if there is not None and verify_file(target.store, target.folder, data_file, ahead=ahead) is None:
        done(data_file.bytes)
        return False
    found = source.store.head(join_key(source.folder, data_file.path))
    if found is None or found.bytes != data_file.bytes:
        raise CheckpointError(
            "a data file is missing" if found is None else "a data file has the wrong size",
            where=f"{source.uri}: {data_file.path}", got=found and f"{found.bytes} bytes",
            wanted=f"{data_file.bytes} bytes", remedy="copy an earlier checkpoint",
        )  # fmt: skip
    with target.store.writer(join_key(target.folder, data_file.path), data_file.bytes) as out:
        for block in checked_blocks(source.store, source.folder, data_file, found.etag, ahead):
            if block.damaged:
                raise CheckpointError(
                    "a data file is damaged: a checksum does not fit",
                    where=f"{source.uri}: {data_file.path}, chunk {block.damaged[0]}", wanted="what was written",
                    remedy="copy an earlier checkpoint, or restore the file from a copy",
                )  # fmt: skip
            out.write(block.data)
            done(len(block.data))
    return True


def _commit(target: Place, manifest: Manifest, data: bytes) -> None:
    """Put the manifest when all files have been seen in full size."""
    wrong = verify_checkpoint(target.store, target.folder, manifest, quick=True)
    if wrong:
        raise CheckpointError(
            "a copied file is not what was written", where=f"{target.uri}: {wrong[0].file}", got=wrong[0].what,
            remedy="something else writes or deletes there; copy again",
        )  # fmt: skip
    try:
        target.store.put(target.manifest_key, data, if_absent=True)
    except AlreadyExists:
        _refuse_other(target, data)

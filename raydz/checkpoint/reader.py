"""Reading: chunk-aligned ranges of one version of each file, in parallel, verified, then handed to the pieces.

Neighbours: `load.py` calls this with the runs of `load_plan.py`; `storage/` does the requests. Stage, world size and
dtype may differ from those of the save; nothing is converted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue

import numpy as np
import torch

from raydz.checkpoint.checksums import crc_function
from raydz.checkpoint.find import checkpoint_uri, join_key
from raydz.checkpoint.load_plan import Run
from raydz.checkpoint.manifest import ITEM_BYTES, DataFile, Manifest
from raydz.checkpoint.pieces import DTYPES
from raydz.dist import Communicator
from raydz.dist.agreement import on_every_rank
from raydz.errors import CheckpointError
from raydz.storage import Store

READS_AT_ONCE = 8
"""Reads in flight of a rank, each of at most `load_plan.READ_BYTES`."""


class CheckpointReader:
    """The data files of one checkpoint.

    Attributes:
        bytes_read: from the store, so far.
    """

    def __init__(self, store: Store, folder: str, manifest: Manifest) -> None:
        self._store, self._folder, self._files = store, folder, manifest.files
        self.where = checkpoint_uri(store, folder)
        self._etags: dict[int, str] = {}
        self.bytes_read = 0

    def check_there(self, indices: Iterable[int]) -> None:
        """Note the version of each file that will be read, in parallel.

        Raises:
            CheckpointError: one is missing or has another size; of several the first in the manifest.
        """
        ordered = sorted(set(indices))
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="raydz-look") as pool:
            self._etags |= dict(zip(ordered, pool.map(self._etag, ordered), strict=True))

    def _etag(self, index: int) -> str:
        data_file = self._files[index]
        found = self._store.head(join_key(self._folder, data_file.path))
        if found is None or found.bytes != data_file.bytes:
            raise CheckpointError(
                "a data file is missing" if found is None else "a data file has the wrong size",
                where=f"{self.where}: {data_file.path}", got=found and f"{found.bytes} bytes",
                wanted=f"{data_file.bytes} bytes", remedy="load an earlier checkpoint",
            )  # fmt: skip
        return found.etag

    def read(self, run: Run, buffer: np.ndarray) -> np.ndarray:
        """The verified bytes of a run, in the beginning of `buffer`.

        Raises:
            CheckpointError: a checksum does not fit; names file and chunk.
        """
        data_file, filled = self._files[run.file], buffer[: run.bytes]
        key = join_key(self._folder, data_file.path)
        self._store.read_into(key, run.start, filled.data, if_match=self._etags[run.file])
        verify_chunks(filled.data, run.start, data_file, self.where)
        return filled

    def fill(self, runs: Sequence[Run]) -> None:
        """Read all runs and hand them over, several at once.

        Memory: `READS_AT_ONCE` buffers of the longest run.

        Raises:
            CheckpointError: a fault, the first in the order of runs; others may have been handed over.
        """
        buffers: SimpleQueue[np.ndarray] = SimpleQueue()
        for _ in range(min(READS_AT_ONCE, len(runs))):
            buffers.put(new_buffer(runs))

        def work(run: Run) -> None:
            buffer = buffers.get()
            try:
                hand_over(run, self.read(run, buffer))
            finally:
                buffers.put(buffer)

        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="raydz-load") as pool:
            futures = [pool.submit(work, run) for run in runs]
            try:
                for run, future in zip(runs, futures, strict=True):
                    future.result()
                    self.bytes_read += run.bytes
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def fill_together(self, runs: Sequence[Run], comm: Communicator) -> None:
        """Read runs that all ranks of `comm` need alike, each by one of them, which sends it to the others.

        Collective: every rank of `comm`, with the same runs. Memory: `READS_AT_ONCE` + 1 buffers.

        Raises:
            CheckpointError: on every rank of `comm`, what any of them met; nobody waits for a rank that failed.
        """
        if comm.world_size == 1:
            self.fill(runs)
            return
        mine = runs[comm.rank :: comm.world_size]
        buffers = [new_buffer(runs) for _ in range(min(READS_AT_ONCE, len(mine)))]
        spare = new_buffer(runs)
        with ThreadPoolExecutor(READS_AT_ONCE, thread_name_prefix="raydz-load") as pool:
            ahead: dict[int, Future[np.ndarray]] = {}

            def launch(index: int) -> None:
                if index < len(mine):
                    ahead[index] = pool.submit(self.read, mine[index], buffers[index % len(buffers)])

            try:
                for index in range(READS_AT_ONCE):
                    launch(index)
                for index, first in enumerate(range(0, len(runs), comm.world_size)):
                    own = on_every_rank(comm, ahead[index].result) if index in ahead else on_every_rank(comm, _nothing)
                    for source, run in enumerate(runs[first : first + comm.world_size]):
                        filled = spare[: run.bytes] if own is None or source != comm.rank else own
                        comm.broadcast(torch.from_numpy(filled), source=source)
                        hand_over(run, filled)
                    if own is not None:
                        self.bytes_read += len(own)
                    launch(index + READS_AT_ONCE)
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise


def _nothing() -> None:
    """What a rank reads in the last round when there are fewer runs than ranks."""


def new_buffer(runs: Sequence[Run]) -> np.ndarray:
    """Memory for any of the runs; not zeroed, for only what was read is handed over."""
    return np.empty(max((run.bytes for run in runs), default=0), np.uint8)


def verify_chunks(buffer: memoryview, start: int, data_file: DataFile, where: str) -> None:
    """Compare the chunks of a file that lie from byte `start` (where a chunk begins) on in `buffer`.

    Raises:
        CheckpointError: a checksum does not fit; names file and chunk.
    """
    crc = crc_function(data_file.algorithm, f"{where}: {data_file.path}")
    for low in range(0, len(buffer), data_file.chunk_bytes):
        index = (start + low) // data_file.chunk_bytes
        if crc(buffer[low : low + data_file.chunk_bytes], 0) != data_file.chunk_crcs[index]:
            raise CheckpointError(
                "a data file is damaged: a checksum does not fit", where=f"{where}: {data_file.path}, chunk {index}",
                got=f"bytes {start + low} to {start + low + data_file.chunk_bytes}", wanted="what was written",
                remedy="load an earlier checkpoint, or restore the file from a copy",
            )  # fmt: skip


def hand_over(run: Run, filled: np.ndarray) -> None:
    """Write what a run holds to the pieces that need it."""
    for need in run.needs:
        low, high = max(need.start, run.start), min(need.stop, run.stop)
        width = ITEM_BYTES[need.dtype]
        values = torch.from_numpy(filled[low - run.start : high - run.start]).view(DTYPES[need.dtype])
        need.piece.write(need.offset + (low - need.start) // width, values)

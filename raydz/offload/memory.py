"""Host memory for what leaves the device: exact sizes, a budget that refuses in words, pinned where a GPU copies.

Layer 3. `tiers.py`, `nvme.py`, `parameters.py` and `activations.py` take their buffers here. README.md, "Host memory".
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from raydz.errors import OffloadError
from raydz.tracking.memory import memory_bytes
from raydz.units import format_bytes, parse_bytes

PAGE = 4096
"""Alignment of every buffer: what O_DIRECT wants of an address and a length."""

KEY = "parallel.host_memory_budget"
_REMEDY = (
    f"raise {KEY}; offload_optimizer.ratio below 1 keeps a part on the device; offload_optimizer.device: nvme, or "
    "bf16.bf16_optimizer_states, needs less of the host"
)
_DEFAULT_SHARE = 0.9
_PIECE_BYTES = 1 << 27
_MADV_POPULATE_WRITE = 23  # Linux 5.14

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long
)  # fmt: skip
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def host_budget(asked: str | float | None, local_world_size: int = 1) -> int:
    """Bytes that a rank may hold: its equal share of what its node gives to offload.

    Args:
        asked: `parallel.host_memory_budget`: bytes of the node (a number above 1, or text such as `64GiB`), or a
            fraction of what is available now, by /proc/meminfo and by the control group's limit; None: 0.9 of it.
    """
    if asked is None or (isinstance(asked, int | float) and asked <= 1):
        available = memory_bytes()[1]
        return int(available * (_DEFAULT_SHARE if asked is None else asked)) // local_world_size
    return parse_bytes(asked) // local_world_size


class HostMemory:
    """Buffers in host memory within a budget.

    Args:
        budget_bytes: most that is held at a time, by this process alone.
        pinned: register buffers with CUDA where there is a device, so that copies to and from it are asynchronous and
            run at the link's speed. Without a device it has no effect.
    """

    def __init__(self, budget_bytes: int, pinned: bool = True) -> None:
        self.budget_bytes = budget_bytes
        self.pinned = pinned and torch.cuda.is_available()
        self._held: dict[int, _Mapping] = {}
        self._held_bytes = 0
        self._lock = threading.RLock()  # a garbage collection within it may release a buffer

    @property
    def bytes_held(self) -> int:
        """Of all buffers that were not given back, whole pages each."""
        return self._held_bytes

    def empty(self, numel: int, dtype: torch.dtype, what: str = "a buffer", *, pinned: bool | None = None) -> Tensor:
        """A new buffer, (numel,), zeros; its address is a multiple of 4096, and the rest of its last page is its own.

        Args:
            pinned: of this buffer; None: as of the others.

        Ownership: the memory is given back by `free`, or when the last tensor on it is gone.

        Raises:
            OffloadError: it does not fit into the budget, or the system refuses it. Nothing is held then.
        """
        num_bytes = -(-numel * dtype.itemsize // PAGE) * PAGE
        if num_bytes == 0:
            return torch.empty(0, dtype=dtype)
        with self._lock:
            if self._held_bytes + num_bytes > self.budget_bytes:
                raise self._refusal(num_bytes, what)
            mapping = _Mapping.of(num_bytes)
            self._held[mapping.address] = mapping
            self._held_bytes += num_bytes
        memory = mapping.array()
        weakref.finalize(memory, self._release, mapping, is_last=True).atexit = False
        if self.pinned if pinned is None else pinned and torch.cuda.is_available():
            try:
                mapping.register()
            except OffloadError:
                self._release(mapping)
                raise
        return torch.frombuffer(memory, dtype=dtype, count=numel)

    def free(self, tensor: Tensor) -> None:
        """Give the memory of `tensor`, as `empty` made it, back at once.

        Ownership: no copy from or to it may be in flight, and nobody reads it or a view of it afterwards (they would
        find zeros). A tensor of another `HostMemory`, or one that was freed before, is left alone.
        """
        with self._lock:
            mapping = self._held.get(tensor.untyped_storage().data_ptr())
        if mapping is not None:
            self._release(mapping)

    def close(self) -> None:
        """Give everything back, as `free` does."""
        with self._lock:
            mappings = list(self._held.values())
        for mapping in mappings:
            self._release(mapping)

    def _release(self, mapping: _Mapping, is_last: bool = False) -> None:
        """By `free`, or when the last tensor is gone (`is_last`), or first the one and then the other."""
        with self._lock:
            if self._held.get(mapping.address) is mapping:
                del self._held[mapping.address]
                self._held_bytes -= mapping.num_bytes
                mapping.give_back()
            if is_last:
                mapping.unmap()

    def _refusal(self, num_bytes: int, what: str) -> OffloadError:
        total, available = memory_bytes()
        return OffloadError(
            f"offload would hold more host memory than its budget: {what}",
            where=KEY,
            got=f"{format_bytes(num_bytes)} asked, {format_bytes(self._held_bytes)} held",
            wanted=f"at most {format_bytes(self.budget_bytes)} a rank; the host has {format_bytes(available)} "
            f"available of {format_bytes(total)}",
            remedy=_REMEDY,
        )


@dataclass(eq=False)
class _Mapping:
    """Anonymous memory in whole pages, in huge ones where the system has them."""

    address: int
    num_bytes: int
    is_registered: bool = False

    @classmethod
    def of(cls, num_bytes: int) -> _Mapping:
        protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, num_bytes, protection, flags, -1, 0)
        if address in (None, ctypes.c_void_p(-1).value):
            raise _refused_by_system(num_bytes, os.strerror(ctypes.get_errno()))
        _libc.madvise(address, num_bytes, mmap.MADV_HUGEPAGE)  # advice: a system without huge pages ignores it
        return cls(address, num_bytes)

    def array(self) -> ctypes.Array[ctypes.c_ubyte]:
        """The memory as an object that tensors keep alive."""
        return (ctypes.c_ubyte * self.num_bytes).from_address(self.address)

    def register(self) -> None:
        """Pin it. The pages are made first, by several threads: CUDA would make them one after the other."""
        with ThreadPoolExecutor(min(8, len(os.sched_getaffinity(0)))) as threads:
            starts = range(0, self.num_bytes, _PIECE_BYTES)
            list(threads.map(lambda start: self._populate(start, min(_PIECE_BYTES, self.num_bytes - start)), starts))
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)
        if int(error) != 0:
            raise _refused_by_system(self.num_bytes, f"cudaHostRegister: {error}")
        self.is_registered = True

    def _populate(self, start: int, num_bytes: int) -> None:
        _libc.madvise(self.address + start, num_bytes, _MADV_POPULATE_WRITE)  # older systems: CUDA does it

    def give_back(self) -> None:
        """The memory is the system's again, the addresses stay this process's: a late reader finds zeros."""
        if self.is_registered:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self.is_registered = False
        _libc.madvise(self.address, self.num_bytes, mmap.MADV_DONTNEED)

    def unmap(self) -> None:
        _libc.munmap(self.address, self.num_bytes)


def _refused_by_system(num_bytes: int, reason: str) -> OffloadError:
    total, available = memory_bytes()
    return OffloadError(
        "the system refuses host memory for offload",
        where=KEY,
        got=f"{format_bytes(num_bytes)} asked: {reason}",
        wanted=f"{format_bytes(available)} are available of {format_bytes(total)}",
        remedy="raise the limit of locked memory (ulimit -l), set pin_memory to false, or lower " + KEY,
    )

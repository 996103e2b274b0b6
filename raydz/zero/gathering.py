"""How the shards of a flat group come together: from all ranks or from near ones, exact or as int8.

Neighbours: `group.py` owns one where weights are released; `dist/collectives.py` moves the bytes. See "ZeRO++" in
README.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from raydz.dist import Communicator, Handle
from raydz.offload.parameters import Arrival, ParameterOffload, fetching
from raydz.ops.quantise import pack_int8, packed_bytes, unpack_int8


@dataclass
class SecondCopy:
    """This rank's part of what near ranks keep of a group's weights, as it arrived from all ranks.

    Args:
        comm: of the near ranks.
        is_current: the weights have not changed since.
    """

    comm: Communicator
    values: Tensor
    is_current: bool = False


class WeightGathering:
    """Gathers of one flat group.

    The first one after an update comes from all ranks. Where there are near ranks, each keeps its part of what then
    arrived, and until the next update they gather it among themselves alone: the same bits.

    Args:
        full: a gathered buffer.
        comm: of the ranks that share the group.
        near: of those that keep a second copy of it among themselves; None: there is none.
        as_int8: what travels is rounded, and every rank reads the rounded values, of its own part too.
        offload: where this rank's part lies in host memory; None: it is on the device.
    """

    def __init__(
        self, full: Tensor, comm: Communicator, near: Communicator | None = None, *, as_int8: bool = False,
        offload: ParameterOffload | None = None,
    ) -> None:  # fmt: skip
        self._comm, self._as_int8, self._offload = comm, as_int8, offload
        self._arrival = Arrival()
        self._row_bytes = packed_bytes(full.numel() // comm.world_size)
        self.second: SecondCopy | None = None
        if near is not None:
            sent = self._message(full)
            self.second = SecondCopy(near, sent.new_zeros(sent.numel() // near.world_size))

    def launch(self, full: Tensor, own: Tensor, *, tag: int, what: str) -> Handle:
        """Start to fill `full`. Collective: every rank of the group, or the near ones.

        Shape: full (padded_numel,), own (padded_numel / world_size,). Ownership: `own` is read at once.
        """
        second = self.second if self.second is not None and self.second.is_current else None
        comm = self._comm if second is None else second.comm
        sent = self._message(full)
        part = _part_of(sent, comm)
        with fetching(self._offload) as arrival:
            self._arrival = arrival
            if second is not None:
                part.copy_(second.values)
            elif self._as_int8:
                pack_int8(self._on_device(own, full).view(1, -1), part.view(1, -1))
            elif self._offload is not None:
                self._offload.fetch(own, part)
            else:
                part.copy_(own)
            finish = partial(self._arrived, sent, full, arrival)
            return comm.all_gather_flat(sent, tag=tag, what=what, finish=finish)

    def await_fetch(self) -> None:
        """Let the current stream wait for this rank's part alone, so that it is counted apart from the gather."""
        if self._offload is not None:
            self._offload.await_fetch(self._arrival)

    def _on_device(self, own: Tensor, full: Tensor) -> Tensor:
        if self._offload is None:
            return own
        fetched = torch.empty_like(own, device=full.device)
        self._offload.fetch(own, fetched)
        return fetched

    def _message(self, full: Tensor) -> Tensor:
        """The buffer that is gathered: `full` itself, or all ranks' packed rows."""
        if not self._as_int8:
            return full
        return torch.empty(self._row_bytes * self._comm.world_size, dtype=torch.uint8, device=full.device)

    def _arrived(self, sent: Tensor, full: Tensor, arrival: Arrival) -> None:
        arrival.wait()
        if self.second is not None and not self.second.is_current:
            self.second.values.copy_(_part_of(sent, self.second.comm))
            self.second.is_current = True
        if self._as_int8:
            unpack_int8(sent.view(self._comm.world_size, -1), full.view(self._comm.world_size, -1))

    def forget(self) -> None:
        """The weights have changed: the next gather comes from all ranks again."""
        if self.second is not None:
            self.second.is_current = False


def _part_of(flat: Tensor, comm: Communicator) -> Tensor:
    numel = flat.numel() // comm.world_size
    return flat[comm.rank * numel : (comm.rank + 1) * numel]

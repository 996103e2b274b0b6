"""Where masters and optimizer states live between their updates: the protocol, and host memory as its plain form.

Layer 3. `pipeline.py` works through a tier; `nvme.py` is the other one. README.md, "Tiers".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from raydz.offload.memory import HostMemory
from raydz.optim import WeightShard

WEIGHTS = ("home", "low", "separate")
"""Names of a unit's tensors that are its weights, as fields of `optim.WeightShard`; all others are states."""


@dataclass(frozen=True)
class UnitShape:
    """What a tier keeps of one unit: a flat group's owned elements, or the part [start, stop) of them.

    Args:
        group: position among the trainable flat groups; their units follow one another.
        tensors: dtype by name, each `stop - start` elements long: `home` (the weights as forward reads them), `low` or
            `separate` where the master needs them, and the states, which begin at zero.
    """

    group: int
    start: int
    stop: int
    tensors: Mapping[str, torch.dtype]
    label: str = ""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def num_bytes(self) -> int:
        return sum(self.numel * dtype.itemsize for dtype in self.tensors.values())


def cut_units(wholes: Sequence[UnitShape], limit: int | None) -> list[UnitShape]:
    """The units of a tier whose slots hold `limit` elements (None: any number): what is longer is cut."""
    return [part for whole in wholes for part in _cut(whole, limit or max(whole.numel, 1))]


def _cut(whole: UnitShape, limit: int) -> Iterator[UnitShape]:
    for start in range(whole.start, max(whole.stop, whole.start + 1), limit):
        stop = min(start + limit, whole.stop)
        yield UnitShape(whole.group, start, stop, whole.tensors, whole.label)


class Tier(Protocol):
    """Keeps units, numbered as they were given. Used by one thread at a time."""

    def begin(self, order: Sequence[int]) -> None:
        """The next fetches come in this order; reading ahead may begin."""

    def fetch(self, index: int) -> dict[str, Tensor]:
        """The unit's tensors in host memory. Blocking.

        Ownership: the caller's, to be changed in place, until it calls `write_back` or `release`.

        Raises:
            OffloadError: they could not be read; names path and errno.
        """

    def write_back(self, index: int) -> None:
        """Keep what became of the tensors. Returns at once; they may not be touched any more."""

    def release(self, index: int) -> None:
        """Nothing was changed."""

    def view(self, index: int) -> dict[str, Tensor]:
        """The unit's tensors for whoever reads or changes them between steps, at leisure; good until the next `begin`.

        Before it is called, everything that was fetched has been given back.
        """

    def finish(self) -> None:
        """Everything is where it belongs. Blocking.

        Raises:
            OffloadError: something could not be written; names path and errno.
        """

    def take_waits(self) -> dict[str, float]:
        """Seconds that calls waited since this was asked last, by cause: `disk_read`, `disk_write`."""

    @property
    def bytes_held(self) -> dict[str, int]:
        """Bytes by place: `host`, `disk`."""

    def close(self) -> None:
        """Give everything back. May be called twice."""


class ViewedShard(WeightShard):
    """Weights of which forward reads `compute`, and whose other parts a tier shows when somebody asks for them.

    Args:
        view: gives the unit's tensors by name.
    """

    def __init__(self, compute: Tensor, view: Callable[[], dict[str, Tensor]]) -> None:
        self.compute, self._view = compute, view

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        return self._view()

    @property
    def home(self) -> Tensor | None:  # type: ignore[override]
        return self._tensors.get("home")

    @property
    def low(self) -> Tensor | None:  # type: ignore[override]
        return self._tensors.get("low")

    @property
    def separate(self) -> Tensor | None:  # type: ignore[override]
        return self._tensors.get("separate")


class HostTier:
    """All units in host memory, where they are changed in place; with second buffers, in turn in one and the other.

    Args:
        memory: what the buffers come from; closed by whoever made it.
        pinned: page-lock what is copied to the device.

    Raises:
        OffloadError: the budget is too small.
    """

    def __init__(self, units: Sequence[UnitShape], memory: HostMemory, *, pinned: bool = True) -> None:
        self._units, self._memory, self._pinned = list(units), memory, pinned
        self._current = [self._allocate(unit) for unit in self._units]
        self._second: list[dict[str, Tensor]] = []

    def _allocate(self, unit: UnitShape) -> dict[str, Tensor]:
        return {
            name: self._memory.empty(
                unit.numel, dtype, f"{name} of {unit.label}", pinned=self._pinned and name == "home"
            )  # the rest never meets the device, and page-locking takes half a second a GiB
            for name, dtype in unit.tensors.items()
        }

    def begin(self, order: Sequence[int]) -> None:
        pass

    def fetch(self, index: int) -> dict[str, Tensor]:
        return self._current[index]

    def view(self, index: int) -> dict[str, Tensor]:
        return self._current[index]

    def write_back(self, index: int) -> None:
        pass

    def release(self, index: int) -> None:
        pass

    def finish(self) -> None:
        pass

    def take_waits(self) -> dict[str, float]:
        return {}

    def add_second(self) -> None:
        """Get second buffers for all units, or none.

        Raises:
            OffloadError: the budget is too small.
        """
        taken: list[dict[str, Tensor]] = []
        try:
            for unit in self._units:
                taken.append(self._allocate(unit))
        except BaseException:
            for tensors in taken:
                self._free(tensors)
            raise
        self._second = taken

    @property
    def has_second(self) -> bool:
        return bool(self._second)

    def second(self, index: int) -> dict[str, Tensor]:
        """The buffers that do not count."""
        return self._second[index]

    def swap(self, index: int) -> None:
        """What the second buffers hold counts from now on."""
        self._current[index], self._second[index] = self._second[index], self._current[index]

    @property
    def bytes_held(self) -> dict[str, int]:
        return {"host": sum(t.nbytes for unit in [*self._current, *self._second] for t in unit.values())}

    def close(self) -> None:
        for tensors in [*self._current, *self._second]:
            self._free(tensors)
        self._current, self._second = [], []

    def _free(self, tensors: dict[str, Tensor]) -> None:
        for tensor in tensors.values():
            self._memory.free(tensor)

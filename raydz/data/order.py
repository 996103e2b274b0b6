"""Which rows make up which batch: pure functions of (seed, step), the same for every world size.

Layer 4, read by train/loop.py beside packing. After any failure or resize the loop goes on with the next step, and each
row is used exactly once an epoch: see the note "Order without memory" in README.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from raydz.errors import ConfigError, DataError

_NUM_ROUNDS = 6


def permute(indices: np.ndarray, num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Map each of 0..num_rows-1 to another one, one to one, without a table.

    Shape: any; the result has the shape of `indices`. Dtype: int64.
    Source: Feistel network on 2h bits with cycle walking (Black and Rogaway, "Ciphers with Arbitrary Finite
        Domains", 2002); the domain is below 4 * num_rows, so fewer than 4 walks are expected.
    """
    half_bits = max(1, ((num_rows - 1).bit_length() + 1) // 2)
    keys = [_round_key(seed, epoch, number) for number in range(_NUM_ROUNDS)]
    values = _feistel(np.asarray(indices).astype(np.uint64), half_bits, keys)
    outside = values >= num_rows
    while outside.any():
        values[outside] = _feistel(values[outside], half_bits, keys)
        outside = values >= num_rows
    return values.astype(np.int64)


def _round_key(seed: int, epoch: int, number: int) -> np.uint64:
    digest = hashlib.blake2b(f"{seed}.{epoch}.{number}".encode(), digest_size=8).digest()
    return np.uint64(int.from_bytes(digest, "little"))


def _feistel(values: np.ndarray, half_bits: int, keys: list[np.uint64]) -> np.ndarray:
    shift, mask = np.uint64(half_bits), np.uint64((1 << half_bits) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of splitmix64: every input bit reaches the low bits that the mask keeps."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@dataclass(frozen=True)
class BatchOrder:
    """The rows of each global batch: sample g = step * batch_size + j is row perm(g % num_rows) of epoch g // num_rows.

    Raises:
        DataError: no rows. ConfigError: batch_size below 1.
    """

    num_rows: int
    batch_size: int
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_rows < 1:
            raise DataError("there are no rows to train on", got=self.num_rows, wanted="at least 1")
        if self.batch_size < 1:
            raise ConfigError("the batch size must be positive", where="train_batch_size", got=self.batch_size)

    def indices(self, step: int) -> np.ndarray:
        """The rows of global batch `step` (counted from 0). A batch may span two epochs.

        Shape: (batch_size,). Dtype: int64.
        """
        first = step * self.batch_size
        samples = np.arange(first, first + self.batch_size, dtype=np.int64)
        epochs, within = np.divmod(samples, self.num_rows)
        rows = np.empty_like(samples)
        for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
            of_epoch = epochs == epoch
            rows[of_epoch] = permute(within[of_epoch], self.num_rows, self.seed, epoch)
        return rows

    def epoch(self, step: int) -> float:
        """Epochs finished before `step`."""
        return step * self.batch_size / self.num_rows

    def state(self, next_step: int) -> dict[str, int]:
        """What a checkpoint keeps so that `check_resume` can tell whether the order goes on."""
        return {"seed": self.seed, "num_rows": self.num_rows, "batch_size": self.batch_size, "next_step": next_step}

    def check_resume(self, state: Mapping[str, Any]) -> int:
        """Return the step to go on with.

        Raises:
            DataError: rows, seed or batch size differ from the checkpoint's: samples would be lost or seen twice.
        """
        remedies = {
            "num_rows": "give the same data and sequence length, or start a new run from the checkpoint's weights",
            "seed": "set the seed back, or start a new run from the checkpoint's weights",
            "batch_size": "keep train_batch_size; change the micro-batch or accumulation instead",
        }
        for name, remedy in remedies.items():
            if state[name] != getattr(self, name):
                raise DataError(
                    f"the order of the data cannot go on: {name} differs from the checkpoint's",
                    got=getattr(self, name),
                    wanted=state[name],
                    remedy=remedy,
                )
        return int(state["next_step"])


def split(indices: np.ndarray, rank: int, world_size: int, micro_batch_size: int) -> list[np.ndarray]:
    """The micro-batches of `rank`: views of one contiguous piece of the batch.

    Where ranks do not divide the batch the first ones get one row more. All ranks get the same number of
    micro-batches, because each is a collective; the last ones of a rank may be smaller, or empty.
    """
    base, extra = divmod(len(indices), world_size)
    start = rank * base + min(rank, extra)
    mine = indices[start : start + base + (rank < extra)]
    largest = base + (extra > 0)
    return [mine[i : i + micro_batch_size] for i in range(0, largest, micro_batch_size)]

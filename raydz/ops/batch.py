"""Steps that run together: one call of the kernels' threads for any number of slices. Layer 2.

Above: `adamw.py`, `elementwise.py` note their steps here, `raydz.optim.Update` carries a batch to them. Below:
`native/optimizers.cpp`.
"""

from __future__ import annotations

from typing import Any

from raydz.ops.native import require


class Batch:
    """Collects the steps of slices with different settings, and makes them at once.

    A slice of a few thousand elements is not worth a thread, and a call of the pool costs some ten microseconds: a
    shard with many of them is updated as fast as one piece.

    Ownership: the buffers of noted steps are kept alive, and must not be changed, until `run`.
    """

    def __init__(self) -> None:
        self._steps: list[Any] = []

    def __len__(self) -> int:
        return len(self._steps)

    def note(self, step: Any) -> None:
        """Keep a step, as a function of `raydz._native` made it, for `run`."""
        self._steps.append(step)

    def run(self, threads: int = 1) -> int:
        """Make all noted steps and forget them; returns how many scaled gradients are not finite.

        Args:
            threads: at most so many; the result does not depend on it.
        """
        steps, self._steps = self._steps, []
        return require().run_steps(steps, threads) if steps else 0


def run_or_note(step: Any, threads: int, batch: Batch | None) -> int:
    """Make a step of `raydz._native` now, or leave it to `batch` and return 0."""
    if batch is None:
        return require().run_steps([step], threads)
    batch.note(step)
    return 0

"""Uneven inputs: ranks that have run out of batches shadow the collectives of those that have not.

Neighbours: `engine.py` inherits `JoinAccess` and asks `Joining` about each step; `sharded.py` tells it what happens.
See "Uneven inputs" in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from raydz.dist import Communicator
from raydz.errors import TrainingError
from raydz.zero.communicators import Communicators
from raydz.zero.sharded import Event, ShardedModel, Unit


class Joining:
    """What one `join` block knows: who still has batches, and what a micro-batch does to the units.

    Args:
        comm: of all ranks.
    """

    def __init__(self, sharded: ShardedModel, comm: Communicator) -> None:
        self._sharded, self._comm = sharded, comm
        self._trace: list[tuple[Event, Unit | None, bool]] = []
        self._noted: list[tuple[Event, Unit | None, bool]] = []
        self._is_announced = False
        self._kinds: set[bool] = set()
        self._took_part = [0, 0]

    def note(self, event: Event, unit: Unit | None) -> None:
        """Keep what happens in a micro-batch of this rank's own, for when it has none left."""
        if self._is_announced:
            self._noted.append((event, unit, torch.is_grad_enabled()))

    def announce(self) -> None:
        """Before the first forward of a micro-batch: tell the others. Collective: with `is_over` of other ranks."""
        if self._is_announced or self._sharded.in_backward or not torch.is_grad_enabled():
            return
        self._ask(has_batch=True, is_within_step=True)
        self._is_announced = True

    def is_over(self, *, is_within_step: bool) -> bool:
        """Whether nobody has a batch and no step is half done. Collective: with `announce` of other ranks.

        Raises:
            TrainingError: this rank has not finished its last micro-batch.
        """
        if self._is_announced:
            raise TrainingError(
                "a join ends within a micro-batch", got="a forward without its engine.step()",
                wanted="forward, engine.backward(loss) and engine.step() of every batch inside the block",
            )  # fmt: skip
        return not self._ask(has_batch=False, is_within_step=is_within_step)

    def _ask(self, *, has_batch: bool, is_within_step: bool) -> bool:
        """Whether a micro-batch follows."""
        rows = self._comm.all_gather_values([float(has_batch), float(bool(self._trace))], what="who has a batch")
        follows = is_within_step or any(row[0] for row in rows)
        unable = [rank for rank, row in enumerate(rows) if not any(row)]
        if follows and unable:
            raise TrainingError(
                "a rank without a single batch cannot shadow the others", where="engine.join()",
                got=f"no batch on rank {', '.join(map(str, unable))}", wanted="at least one on every rank",
                remedy="use fewer ranks, or deal the batches out in turn",
            )  # fmt: skip
        return follows

    def count(self, *, is_mean: bool) -> None:
        """A backward of this rank's own, of a mean (no denominator) or of a sum with one."""
        self._kinds.add(is_mean)

    def end_micro_batch(self) -> None:
        """The engine's `step`, on every rank."""
        if self._is_announced:
            self._trace, self._noted = self._noted, []
        for is_mean in self._kinds:
            self._took_part[is_mean] += 1
        self._kinds, self._is_announced = set(), False

    def share(self, num_micro_batches: int) -> float:
        """How many of the step's micro-batches took part, of `num_micro_batches`; 1 where callers gave denominators.

        Collective: every rank, once a step.

        Raises:
            TrainingError: on every rank: some gave a denominator and some did not.
        """
        rows = self._comm.all_gather_values([float(n) for n in self._took_part], what="how many took part")
        self._took_part = [0, 0]
        sums, means = (sum(row[kind] for row in rows) for kind in (0, 1))
        if sums and means:
            raise TrainingError(
                "some micro-batches of a step have a denominator and some have not", where="engine.join()",
                got=f"{sums:g} with and {means:g} without", wanted="engine.backward with it everywhere, or nowhere",
            )  # fmt: skip
        return means / num_micro_batches if means else 1.0

    def shadow(self, *, is_last: bool) -> None:
        """Do to the units what this rank's last micro-batch did, with gradients of zero, and without the module."""
        sharded = self._sharded
        actions: dict[Event, Callable[..., None]] = {
            "before_forward": sharded.before_forward,
            "after_forward": sharded.after_forward,
            "before_backward": sharded.before_backward,
            "completed": sharded.complete_without_gradients,
        }
        for event, unit, has_grad in self._trace:
            with torch.set_grad_enabled(has_grad):
                if event == "begin_backward":
                    sharded.begin_backward(is_last=is_last)
                elif event == "end_backward":
                    sharded.end_backward()
                else:
                    actions[event](unit)


class JoinAccess:
    """The part of the public Engine that joins ranks with unequally many batches; the engine has the attributes."""

    module: nn.Module
    sharded: ShardedModel
    comms: Communicators
    step: Callable[[], Any]
    is_gradient_accumulation_boundary: Callable[[], bool]
    _require_between_steps: Callable[[str | None], None]
    _joining: Joining | None
    _within_step: int

    @contextmanager
    def join(self) -> Iterator[None]:
        """Let ranks train on unequally many batches within the block, and leave it together, after as many steps.

        A rank whose loop ends early contributes gradients of zero until all have ended; a step that has begun is
        completed. A step's gradient is the mean over the micro-batches that took part. Where `backward` is given a
        denominator that stays the divisor: let it count what takes part.

        Only forward, `backward` and `step` belong in the block: whatever else is collective (evaluation at stage 3,
        `gathered`, checkpoints) would wait for ranks that have run out. At least one batch on every rank, whose
        micro-batches all call the same modules.

        Collective: every rank, between steps; a small message for each micro-batch and step more than without it.

        Raises:
            TrainingError: on every rank: one has no batch at all.
        """
        self._require_between_steps("uneven inputs are joined")
        if self._joining is not None:
            raise TrainingError("a join within a join", where="engine.join()", wanted="one block at a time")
        self._joining = joining = Joining(self.sharded, self.comms.world)
        handle = self.module.register_forward_pre_hook(lambda *_: joining.announce(), prepend=True)
        self.sharded.on_event = joining.note
        try:
            yield
            while not joining.is_over(is_within_step=self._within_step > 0):
                joining.shadow(is_last=self.is_gradient_accumulation_boundary())
                self.step()
        finally:
            handle.remove()
            self._joining, self.sharded.on_event = None, None

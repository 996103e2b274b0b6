"""Updates of hosted units by threads of their own, while the device goes on: what is due, tried, on the way, there.

Layer 3. `zero/hosted.py` tells it of gradients and steps and waits for units; it works through a `Tier` and `Links`.
README.md has the picture of a unit's stages ("One step") and says why both modes have the same bits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from raydz import log
from raydz.errors import OffloadError
from raydz.exits import JOIN_S, end_before_exit
from raydz.offload.hosted_unit import Advance, HostedUnit, Stage, StepPlan, Waits
from raydz.offload.links import REACHED, Links, Mark
from raydz.offload.speculation import Judgement, OffloadStep
from raydz.offload.tiers import HostTier, Tier

_logger = log.get(__name__)


class UpdatePipeline:
    """Threads that update units and send weights back.

    Args:
        units: in the order in which forward needs them.
        tier: of the same units.
        allocate: (numel, dtype, what) -> host memory for a gradient.

    Attributes:
        waits: of the training thread: `gradient` for a unit whose gradient has nowhere to go yet, `update` for the CPU,
            `return` for the link to the device.
    """

    def __init__(
        self, units: Sequence[HostedUnit], tier: Tier, links: Links, allocate: Callable[..., Tensor],
        advance: Advance, judgement: Judgement,
    ) -> None:  # fmt: skip
        self._units, self._tier, self._links, self._allocate = list(units), tier, links, allocate
        self._host = tier if isinstance(tier, HostTier) else None
        self._advance, self.judgement, self.waits = advance, judgement, Waits()
        self._changed = threading.Condition()
        self._arrivals: list[int] = []
        self._guess: StepPlan | None = None
        self._foreseen: StepPlan | None = None
        self._plan: StepPlan | None = None
        self._was_tried = self._rolled_back = False
        self._weights_free: Mark = REACHED
        self._ahead_s = self._updating_s = 0.0
        self._committed_at = 0.0
        self._residue_s: float | None = None
        self._error: BaseException | None = None
        self._is_closing = False
        self._threads: list[threading.Thread] = []

    def add_second_buffers(self) -> None:
        """Make room to update before the norm is known, where that is asked for and the host has it."""
        if self._host is None or self.judgement.mode == "waiting":
            return
        try:
            self._host.add_second()
        except OffloadError as error:
            if self.judgement.mode == "speculative":
                raise
            _logger.info("updates wait for the norm: no room for second buffers (%s)", error.got)

    # -- the training thread -----------------------------------------------------------------------------------

    def expect(self, plan: StepPlan | None) -> None:
        """A step's last backward begins. Its update will be `plan` unless the norm decides otherwise; None: unknown."""
        self.drop()
        if self._plan is not None and self._guess is not None:
            ahead_s = self._ahead_s if self._was_tried else None
            self.judgement = self.judgement.after(self._rolled_back, ahead_s, self._residue_s)
        can_try = self._host is not None and self._host.has_second and self.judgement.pays
        with self._changed:
            self._guess, self._foreseen, self._plan = plan, plan if can_try else None, None
            self._was_tried, self._rolled_back = self._foreseen is not None, False
            self._ahead_s, self._residue_s = 0.0, None

    def gradient_arrived(self, index: int, gradient: Tensor) -> None:
        """Send a unit's reduced gradient to the host. Ownership: until the step's `gradients_left` is waited for."""
        unit, since = self._units[index], time.perf_counter()
        with self._changed:
            self._wait(lambda: unit.stage is Stage.REST)
        self.waits.add("gradient", since)
        unit.landed.wait()
        unit.is_awaited = True
        if unit.gradient is None or unit.gradient.dtype != gradient.dtype:
            unit.gradient = self._allocate(gradient.numel(), gradient.dtype, f"the gradient of {unit.shape.label}")
        unit.arrived = self._links.to_host(gradient, unit.gradient)
        self._start()
        with self._changed:
            unit.stage, unit.then = Stage.ARRIVED, Stage.TRIED
            self._arrivals.append(index)
            self._changed.notify_all()

    def gradient_of(self, index: int) -> tuple[Tensor, Mark]:
        """The host's copy of a unit's gradient, and when it is whole."""
        unit = self._units[index]
        assert unit.gradient is not None
        return unit.gradient, unit.arrived

    def is_at_rest(self, index: int) -> bool:
        """Whether the unit's newest weights are where forward fetches them."""
        return self._units[index].stage is Stage.REST

    def has_arrived(self, index: int) -> bool:
        """Whether the step's gradient of the unit was sent."""
        return self._units[index].stage in (Stage.ARRIVED, Stage.TRYING, Stage.TRIED)

    def gradients_left(self) -> None:
        """Let the current stream go on only when all gradients are out of the device's buffers."""
        for unit in self._units:
            unit.arrived.wait()

    def commit(self, plan: StepPlan) -> None:
        """Update all units by `plan`, those that forward needs first first; what was tried with it is kept."""
        self._weights_free = self._links.here()
        with self._changed:
            self.raise_failure()
            self._was_tried = self._foreseen is not None
            self._rolled_back = self._guess is not None and plan != self._guess
            holds = plan == self._foreseen
            for index, unit in enumerate(self._units):
                assert self.has_arrived(index)
                unit.is_awaited = False
                if unit.stage is Stage.TRYING:
                    unit.then = Stage.UPDATED if holds else Stage.DUE
                elif unit.stage is Stage.TRIED and holds:
                    self._keep(index)
                else:
                    unit.stage = Stage.DUE
            self._plan, self._foreseen, self._arrivals = plan, None, []
            self._committed_at = time.perf_counter()
            self._tier.begin([index for index, unit in enumerate(self._units) if unit.stage is Stage.DUE])
            self._changed.notify_all()

    def report(self) -> OffloadStep:
        """How the step went that was just committed or dropped."""
        with self._changed:
            updating_s, self._updating_s = self._updating_s, 0.0
        return OffloadStep(
            mode="speculative" if self._was_tried else "waiting",
            rolled_back=self._rolled_back,
            rollback_rate=self.judgement.rate_with(self._rolled_back),
            waits_s=self._waits_by_cause(),
            updating_s=updating_s,
            ahead_s=self._ahead_s,
        )

    def _waits_by_cause(self) -> dict[str, float]:
        """Where the training thread waited for an update that waited for the tier, the tier is the cause."""
        waits, of_tier = self.waits.take(), self._tier.take_waits()
        update, total = waits.get("update", 0.0), sum(of_tier.values())
        if total and update:
            share = min(1.0, update / total)
            waits |= {cause: seconds * share for cause, seconds in of_tier.items()}
            waits["update"] = update - total * share
        return waits

    def drop(self) -> None:
        """Forget gradients that were not committed, and what was tried with them."""
        with self._changed:
            for unit in self._units:
                if unit.stage in (Stage.ARRIVED, Stage.TRIED):
                    unit.stage = Stage.REST
                elif unit.stage is Stage.TRYING and unit.then is Stage.TRIED:
                    unit.then = Stage.REST
            self._foreseen, self._arrivals = None, []
            self._changed.notify_all()

    def await_unit(self, index: int) -> None:
        """Let the current stream go on only with the newest weights of a unit. Blocking: until they are on their way.

        Raises:
            OffloadError: an update has failed.
        """
        unit = self._units[index]
        self.raise_failure()
        if unit.is_awaited:
            return
        since, is_sent = time.perf_counter(), unit.stage in (Stage.UPDATED, Stage.SENDING)
        with self._changed:
            self._wait(lambda: unit.stage is Stage.REST)
        unit.landed.wait()
        unit.is_awaited = True
        self.waits.add("return" if is_sent else "update", since)

    def finish(self) -> None:
        """All committed updates are made, and their weights on the device. Blocking.

        Raises:
            OffloadError: an update has failed, or the tier could not keep it.
        """
        for index in range(len(self._units)):
            self.await_unit(index)
        with self._changed:
            self._wait(lambda: all(unit.stage is not Stage.TRYING for unit in self._units))
        for unit in self._units:
            unit.landed.synchronize()
        self._tier.finish()

    def close(self) -> None:
        """End the threads and give the memory back; what is under way is not awaited. May be called twice."""
        self._end_threads()
        for unit in self._units:
            unit.landed.synchronize()
            unit.arrived.synchronize()
        self._tier.close()
        for unit in self._units:
            unit.gradient = None

    def _leave(self) -> None:
        """The process ends; a gradient that never comes, since its stream is stuck, is not waited for."""
        self._end_threads(JOIN_S)

    def _end_threads(self, timeout_s: float | None = None) -> None:
        """Blocking: until the unit under way is updated, at most so long a thread."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout_s)
        self._threads = []

    def _wait(self, is_done: Callable[[], bool]) -> None:
        """With the lock held."""
        while not is_done():
            self.raise_failure()
            self._changed.wait()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raises: OffloadError, if an update has failed, at whatever step."""
        if self._error is None:
            return
        if isinstance(self._error, OffloadError):
            raise OffloadError(**self._error.fields()) from self._error
        raise OffloadError(
            "an update of offloaded weights failed", got=f"{type(self._error).__name__}: {self._error}",
            remedy="go on from the last checkpoint: this engine's weights are half old and half new",
        ) from self._error  # fmt: skip

    # -- the two threads ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._threads:
            return
        loops = {"updates": self._update_one, "returns": self._send_one}
        if self._host is None:
            del loops["returns"]
        self._threads = [
            threading.Thread(target=self._loop, args=(one,), name=f"raydz-{name}", daemon=True)
            for name, one in loops.items()
        ]
        for thread in self._threads:
            thread.start()
        end_before_exit(self._leave)

    def _loop(self, one: Callable[[], bool]) -> None:
        try:
            while one():
                pass
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
                self._changed.notify_all()

    def _take(self, choose: Callable[[], Any]) -> Any:
        """What `choose` finds, as soon as it finds something; None when all ends."""
        with self._changed:
            while not self._is_closing and self._error is None:
                found = choose()
                if found is not None:
                    return found
                self._changed.wait()
        return None

    def _update_one(self) -> bool:
        task = self._take(self._next_update)
        if task is None:
            return False
        index, plan, is_try = task
        unit = self._units[index]
        unit.arrived.synchronize()
        unit.landed.synchronize()
        since = time.perf_counter()
        if is_try:
            self._try(index, plan)
        else:
            self._update(index, plan)
        with self._changed:
            self._updating_s += time.perf_counter() - since
        return True

    def _next_update(self) -> tuple[int, StepPlan, bool] | None:
        for index, unit in enumerate(self._units):
            if unit.stage is Stage.DUE:
                assert self._plan is not None
                unit.stage = Stage.UPDATING
                return index, self._plan, False
        if self._foreseen is None or not self._arrivals:
            return None
        index = self._arrivals.pop(self._newest_arrival())
        self._units[index].stage = Stage.TRYING
        return index, self._foreseen, True

    def _newest_arrival(self) -> int:
        """Position of the newest gradient that is there, since its unit is needed first; else of the next to come."""
        newest = 0  # the host sends copies long before the device makes them
        for position in range(1, len(self._arrivals)):
            if not self._units[self._arrivals[position]].arrived.query():
                break
            newest = position
        return newest

    def _update(self, index: int, plan: StepPlan) -> None:
        unit, tensors = self._units[index], self._tier.fetch(index)
        assert unit.gradient is not None
        self._advance(index, tensors, unit.gradient, plan, None)
        if self._host is None:
            unit.landed = self._send_home(unit, tensors)
            unit.landed.synchronize()  # the tier takes its slot back
            self._tier.write_back(index)
        with self._changed:
            unit.stage = Stage.REST if self._host is None else Stage.UPDATED
            self._changed.notify_all()

    def _try(self, index: int, plan: StepPlan) -> None:
        assert self._host is not None
        unit, since = self._units[index], time.perf_counter()
        assert unit.gradient is not None
        self._advance(index, self._host.fetch(index), unit.gradient, plan, self._host.second(index))
        with self._changed:
            now = time.perf_counter()
            if unit.then is Stage.TRIED:
                self._ahead_s += now - since
            elif unit.then is Stage.DUE:
                self._residue_s = now - self._committed_at
            if unit.then is Stage.UPDATED:
                unit.then = Stage.TRIED
                self._keep(index)
            else:
                unit.stage = unit.then
            self._changed.notify_all()

    def _keep(self, index: int) -> None:
        """What was tried counts."""
        assert self._host is not None
        self._host.swap(index)
        self._units[index].stage = Stage.UPDATED

    def _send_one(self) -> bool:
        index = self._take(self._next_return)
        if index is None:
            return False
        unit = self._units[index]
        unit.landed = self._send_home(unit, self._tier.fetch(index))
        with self._changed:
            unit.stage = Stage.REST
            self._changed.notify_all()
        unit.landed.synchronize()  # so that a unit which is needed sooner can overtake those that wait
        return True

    def _send_home(self, unit: HostedUnit, tensors: dict[str, Tensor]) -> Mark:
        if unit.keep is not None:
            self._weights_free.synchronize()
            unit.keep(tensors["home"])
        if unit.weights is None:
            return REACHED
        return self._links.to_device(tensors["home"], unit.weights, self._weights_free)

    def _next_return(self) -> int | None:
        for index, unit in enumerate(self._units):
            if unit.stage is Stage.UPDATED:
                unit.stage = Stage.SENDING
                return index
        return None

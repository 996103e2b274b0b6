"""The figures of one step, as this rank measured them; reduced over ranks by `raydz.tracking`.

Neighbours: `loop.py` starts and ends the watch around a step.
"""

from __future__ import annotations

import time

import torch

from raydz import log
from raydz.engine import Engine, StepReport
from raydz.offload.explain import SlowSteps, figures_of, offload_wait_share, waits_of
from raydz.offload.speculation import OffloadStep
from raydz.tracking import read_peaks, reset_peaks

_logger = log.get(__name__)
_PEAK_BF16_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12}
"""Dense bf16 peak of a device whose name contains the key; vendor data sheets."""


class StepWatch:
    """Takes one step's times on one rank."""

    def __init__(self, engine: Engine, flops_per_token: float | None) -> None:
        self._engine, self._flops_per_token = engine, flops_per_token
        self._peak_flops = _peak_flops(engine.world.device)
        self._slow_steps = SlowSteps(engine.config.parallel.offload_explain_above)
        self.data_wait_s = 0.0
        reset_peaks()

    def start(self) -> None:
        """A step begins."""
        self._engine.clock.take()
        self._started = time.perf_counter()
        self.data_wait_s = 0.0

    def data_arrived(self) -> None:
        """The step's batch is there."""
        self.data_wait_s = time.perf_counter() - self._started

    def stop(self, report: StepReport, num_own_tokens: int) -> dict[str, float]:
        """The step is done: this rank's figures (all but the loss)."""
        if self._engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        step_s = time.perf_counter() - self._started
        waited_s, total_s = self._engine.clock.take()
        figures = {
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "step_time_s": step_s,
            "tokens_per_s": num_own_tokens / step_s,
            "comm_share": waited_s / step_s,
            "comm_time_share": total_s / step_s,
            "data_wait_share": self.data_wait_s / step_s,
            "skipped_steps": float(self._engine.skipped_steps),
            **read_peaks(),
        }
        if report.loss_scale is not None:
            figures["loss_scale"] = report.loss_scale
        if report.offload is not None:
            figures |= self._offload_figures(report.step, step_s, report.offload)
        if self._peak_flops and self._flops_per_token:
            figures["mfu"] = num_own_tokens * self._flops_per_token / step_s / self._peak_flops
        return figures

    def _offload_figures(self, step: int, step_s: float, offload: OffloadStep) -> dict[str, float]:
        """How much of the step waited for offload; where that is too much, the log says why."""
        waits = waits_of(offload)
        verdict = self._slow_steps.judge(step, step_s, waits, figures_of(offload))
        self._slow_steps = verdict.then
        if verdict.line is not None:
            _logger.info(verdict.line)
        share = offload_wait_share(step_s, waits)
        return {"offload_wait_share": share, "offload_rollback_rate": offload.rollback_rate}


def _peak_flops(device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in _PEAK_BF16_FLOPS.items() if key in name), None)

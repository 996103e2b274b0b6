"""`scaling` and `failure`: what is asked of a cluster, and what happens when parts of it go.

Layer 1. `schema.Config` has both; `orchestrate/` obeys them.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from raydz.config.faults import Fault, Unfit
from raydz.config.section import AboveZero, Count, NonNegative, Positive, PositivePair, Section, Text

Auto = Literal["auto"]


class ScalingConfig(Section):
    """`scaling`: what Ray is asked for."""

    num_workers: Positive | PositivePair = 1
    """[min, max]: as many as the cluster has room for, fewer after a loss, more when there is room again."""
    shrink_after_s: NonNegative = 20.0
    """With [min, max]: how long room for the workers of before is waited for, before fewer are started."""
    grow_check_s: AboveZero = 5.0
    """With [min, max]: how often room for more workers is looked for, and asked of an autoscaler."""
    grow_after_s: NonNegative = 60.0
    """With [min, max]: a group trains so long before it is stopped for a larger one, and has so long to go."""
    cpus_per_worker: NonNegative = 1.0
    gpus_per_worker: Auto | NonNegative = "auto"
    resources_per_worker: dict[str, NonNegative] = Field(default_factory=dict)

    @property
    def is_elastic(self) -> bool:
        """Whether the number of workers is a range."""
        return not isinstance(self.num_workers, int)

    @property
    def min_workers(self) -> int:
        """The run waits for so many."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[0]

    @property
    def max_workers(self) -> int:
        """The run has no more."""
        return self.num_workers if isinstance(self.num_workers, int) else self.num_workers[1]

    @model_validator(mode="after")
    def _range_is_one(self) -> ScalingConfig:
        if self.min_workers > self.max_workers:
            got = f"[{self.min_workers}, {self.max_workers}]"
            raise Unfit(Fault("num_workers", "the fewest workers are more than the most", got, "[min, max]"))
        return self


class FailureConfig(Section):
    """`failure`."""

    max_failures: Count = 3
    """Failures within `window_s` that are forgiven; a planned end (a drained node) is not one."""
    window_s: AboveZero = 86400.0
    max_at_same_step: Positive = 3
    """So many failures in a row at one step: `on_poison` decides."""
    on_poison: Literal["stop", "skip"] = "stop"
    """skip: go on without that step's batch."""
    hang_factor: NonNegative = 3.0
    hang_floor_s: NonNegative = 13.0
    """A group hangs if for `hang_factor` median steps and `hang_floor_s` no rank ends a step or launches a collective;
    a floor of 0: never."""
    on_bad_checkpoint: Literal["stop", "previous"] = "stop"
    """When the newest checkpoint turns out to be damaged; previous: begin at the one before."""
    lost_driver_s: NonNegative = 120.0
    """A worker that hears nothing of its driver for so long ends itself; 0: never."""
    preemption_notices: Auto | list[Literal["aws", "google"]] = "auto"
    """Whose notices of a host's end are listened to; auto: of the cloud that the host finds itself in; []: nobody's."""
    notice_file: Text | None = None
    """A path on every host: when a file appears there, that host goes; its first line says why."""
    in_place: bool = True
    """A rank's process that ends is replaced while its worker stays: seconds, not a new group. The model and loss run
    in processes without a connection to Ray then; false: in Ray's workers."""
    memory_snapshot_every: Count = 0
    """Steps between snapshots of every rank's state in host memory, the newest two of which are kept: a restart in
    place goes on from there, not from the newest checkpoint. 0: none. Takes twice the state's bytes; needs `in_place`.
    """

"""What kind of failure ended an attempt, read from what Ray and the workers said. Pure functions.

Neighbours: `fit.py` catches what Ray Train raises and asks `classify`; `policy.py` decides by the kind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from raydz.errors import CheckpointError, PlacementError, RaydzError


class Kind(Enum):
    """Kinds of failures, by what may be done about them."""

    EXCEPTION = "exception"
    """A rank raised something that no typed error stands for."""
    ERROR = "error"
    """A rank raised a typed error."""
    KILLED = "killed"
    """A worker's process is gone."""
    OUT_OF_MEMORY = "out of memory"
    """A process was killed, or an allocation refused, for want of host or device memory."""
    NODE_LOST = "node lost"
    NODE_DRAINED = "node drained"
    """A node was told to go (spot notice, scale-down), and the workers knew."""
    HANG = "hang"
    """No rank made a step for too long."""
    BAD_CHECKPOINT = "bad checkpoint"
    """The checkpoint that the attempt began from is damaged."""
    NO_START = "no start"
    """The group never trained: too few resources in time, or its processes did not come up."""
    NO_ROOM = "no room"
    """What was free when the group was sized had been taken when it was placed."""


@dataclass(frozen=True)
class Failure:
    """One attempt's end.

    Args:
        at: seconds, of any clock that goes on over attempts.
        step: newest step that the attempt is known to have ended; None if it reached none.
        began_at_step: step of the checkpoint it started from.
        cause: one line for people.
        error: what a rank said before it died, if that was a typed error.
    """

    kind: Kind
    at: float
    step: int | None
    began_at_step: int
    cause: str
    error: RaydzError | None = None

    @property
    def failed_step(self) -> int:
        """The step that was under way."""
        return (self.began_at_step if self.step is None else self.step) + 1


# Words of Ray 2.60's messages and class names, and of torch's.
_OUT_OF_MEMORY = ("out of memory", "running low on memory", "OutOfMemory", "DefaultCPUAllocator")
_NODE_GONE = ("node was terminated", "node has died", "Node is dead", "NodeDied")
_DRAINED = ("preempted", "PreemptionError", "DRAIN_NODE")
_NO_ROOM = ("WorkerGroupStartupTimeout",)
_NO_START = ("WorkerGroupStartup", "InsufficientClusterResources", "CheckpointManagerInitialization")
_DIED = ("ActorDied", "ActorUnavailable", "WorkerCrashed", "WorkerHealthCheckFailed", "LocalRayletDied")
_HANGS = ("HealthCheckTimeout", "NCCLHang", "no progress")


def classify(error: BaseException, said: RaydzError | None, *, had_begun: bool) -> tuple[Kind, str]:
    """Kind and one line of a failure; what a rank said in a typed error counts before what Ray saw from outside.

    A rank that merely lost its peers says so in a typed error that may be retried; then Ray's view tells more.

    Args:
        error: what Ray Train raised.
        said: the first typed error of a rank.
        had_begun: the attempt had loaded its checkpoint.
    """
    names, text = [], []
    for link in causes(error):
        names.append(type(link).__name__)
        text.append(str(link))
    everything = " ".join(names) + "\n" + "\n".join(text)
    outside = _outside(everything)
    if said is None or (said.retryable and outside is not Kind.EXCEPTION):
        return outside, _one_line(text)
    if isinstance(said, CheckpointError) and not had_begun:
        return Kind.BAD_CHECKPOINT, said.what
    if isinstance(said, PlacementError):
        return Kind.NO_START, said.what
    if any(mark in said.what for mark in _OUT_OF_MEMORY):
        return Kind.OUT_OF_MEMORY, said.what
    return (Kind.HANG if any(mark in said.what for mark in _HANGS) else Kind.ERROR), said.what


def _outside(text: str) -> Kind:
    """Order matters: a lost node also looks like dead actors, a memory kill also like a dead process."""
    for marks, kind in (
        (_NO_ROOM, Kind.NO_ROOM),
        (_NO_START, Kind.NO_START),
        (_HANGS, Kind.HANG),
        (_DRAINED, Kind.NODE_DRAINED),
        (_OUT_OF_MEMORY, Kind.OUT_OF_MEMORY),
        (_NODE_GONE, Kind.NODE_LOST),
        (_DIED, Kind.KILLED),
    ):
        if any(mark in text for mark in marks):
            return kind
    return Kind.EXCEPTION


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what Ray wrapped in it, and what those were raised from; each once."""
    waiting, seen = [error], set()
    while waiting:
        link = waiting.pop(0)
        if id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        inner = [*getattr(link, "worker_failures", {}).values()]
        inner += [getattr(link, name, None) for name in ("controller_failure", "health_check_failure", "_failure")]
        inner += [link.__cause__, link.__context__]
        waiting += [found for found in inner if isinstance(found, BaseException)]


def _one_line(texts: list[str]) -> str:
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"

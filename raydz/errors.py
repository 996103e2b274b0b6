"""Typed errors: every failure a user can mend says what, where, got, wanted and how to mend it.

Layer 0. Raised everywhere; rendered by `raydz.cli` and by Python's own traceback.
"""

from __future__ import annotations

from typing import Any


class RaydzError(Exception):
    """Base of all errors that a user can act on.

    Args:
        what: one sentence, what went wrong.
        where: config path, file, URI, parameter or rank it is about.
        got: the value found.
        wanted: the value or range that would have been right.
        remedy: what to change.

    The fields are attributes; instances survive pickling, so that they travel from a Ray worker to the driver.
    """

    retryable = False
    """Whether a restart of the same job with the same input may succeed."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        got: Any = None,
        wanted: Any = None,
        remedy: str | None = None,
    ) -> None:
        self.what, self.where, self.got, self.wanted, self.remedy = what, where, got, wanted, remedy
        super().__init__(what)

    def __str__(self) -> str:
        lines = [self.what]
        for label in ("where", "got", "wanted", "remedy"):
            value = getattr(self, label)
            if value is not None:
                lines.append(f"  {label + ':':<8}{value}")
        return "\n".join(lines)

    def fields(self) -> dict[str, Any]:
        """The constructor's arguments by name."""
        return {name: getattr(self, name) for name in ("what", "where", "got", "wanted", "remedy")}

    def __reduce__(self):
        texts = {name: None if value is None else str(value) for name, value in self.fields().items()}
        return _rebuild, (type(self), texts, self.retryable)


def _rebuild(cls: type[RaydzError], fields: dict[str, Any], retryable: bool) -> RaydzError:
    error = cls(**fields)
    error.retryable = retryable
    return error


class ConfigError(RaydzError):
    """The configuration is wrong: unknown key, impossible value, secret in a file."""


class LayoutError(RaydzError):
    """Sizes, dtypes or orders of sharded tensors do not fit together."""


class DataError(RaydzError):
    """Training data are missing, empty, unreadable or do not fit the model."""


class StorageError(RaydzError):
    """A path, bucket or object cannot be read or written."""


class CheckpointError(RaydzError):
    """A checkpoint is missing, incomplete, damaged or does not fit the model."""


class NativeError(RaydzError):
    """The compiled kernels are missing, too old or refuse their arguments."""


class OffloadError(RaydzError):
    """Host memory or a disk cannot hold, take or give back what was offloaded to it."""


class PlacementError(RaydzError):
    """The cluster cannot place the workers that were asked for."""


class TrainingError(RaydzError):
    """Training cannot go on: for example too many non-finite steps in a row."""


class Superseded(TrainingError):
    """A newer start of the same run has taken over; this one must end and leave the run's records alone."""

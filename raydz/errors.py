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

    def __reduce__(self):
        fields = {k: None if v is None else str(v) for k, v in self.__dict__.items() if k != "what"}
        return _rebuild, (type(self), self.what, fields)


def _rebuild(cls: type[RaydzError], what: str, fields: dict[str, Any]) -> RaydzError:
    error = cls(what)
    error.__dict__.update(fields)
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


class PlacementError(RaydzError):
    """The cluster cannot place the workers that were asked for."""


class TrainingError(RaydzError):
    """Training cannot go on: for example too many non-finite steps in a row."""

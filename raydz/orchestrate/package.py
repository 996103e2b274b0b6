"""What of a working directory travels with a job, measured before it is sent.

Neighbours: `submit.py` checks a package before Ray makes one. The walk is Ray's own, private as it is: what it leaves
out (`.gitignore`, `.rayignore`, excludes) must be what Ray leaves out. A test compares with the archive that Ray makes.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.ray_constants import (
    DASHBOARD_CLIENT_MAX_SIZE,
    RAY_RUNTIME_ENV_IGNORE_GITIGNORE,
    get_runtime_env_default_excludes,
)
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes

from raydz.errors import ConfigError
from raydz.units import format_bytes

LIMIT_BYTES = int(DASHBOARD_CLIENT_MAX_SIZE)
"""What the dashboard takes as one request; Ray's documentation names a larger limit, which comes after this one."""

_ENTRY_BYTES, _END_BYTES = 76, 22
"""Of the archive, beside the files: two headers for each (and its name in both), and the end record."""
_NUM_SHOWN = 5


@dataclass(frozen=True)
class Package:
    """A directory as Ray would send it.

    Args:
        files: relative path -> bytes; empty folders are 0 bytes.
    """

    folder: Path
    files: dict[str, int]

    @property
    def total_bytes(self) -> int:
        """Size of the archive: Ray does not compress."""
        headers = sum(_ENTRY_BYTES + 2 * len(name.encode()) for name in self.files)
        return sum(self.files.values()) + headers + _END_BYTES

    def largest(self, num: int = _NUM_SHOWN) -> list[tuple[str, int]]:
        """The largest files, largest first."""
        return sorted(self.files.items(), key=lambda item: (-item[1], item[0]))[:num]

    def left_out(self, words: Sequence[str]) -> list[str]:
        """Those words of a command that name files here which do not travel."""
        found = []
        for word in words:
            path = Path(os.path.normpath(word))
            if not path.is_absolute() and (self.folder / path).is_file() and str(path) not in self.files:
                found.append(word)
        return found


def survey(folder: str | Path, excludes: Sequence[str] = ()) -> Package:
    """List what Ray would send of `folder`.

    Args:
        excludes: patterns as in `.gitignore`, beside Ray's own (`.git`, `.venv`, `venv`, `__pycache__`).

    Raises:
        ConfigError: not a readable folder.
    """
    root = Path(folder).expanduser().absolute()
    if not root.is_dir():
        raise ConfigError(
            "the working directory is not a folder", where="--working-dir", got=str(root),
            remedy="give a folder, or the URI of a zip archive such as s3://bucket/package.zip",
        )  # fmt: skip
    files: dict[str, int] = {}

    def note(path: Path) -> None:
        if path.is_file():
            files[str(path.relative_to(root))] = path.stat().st_size
        elif path.is_dir() and next(path.iterdir(), None) is None and path != root:
            files[f"{path.relative_to(root)}/"] = 0

    patterns = [*get_runtime_env_default_excludes(), *excludes]
    reads_gitignore = os.environ.get(RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    try:
        _dir_travel(root, [_get_excludes(root, patterns)], note, include_gitignore=reads_gitignore, logger=_silent())
    except OSError as error:
        raise ConfigError(
            "the working directory cannot be read", where=str(error.filename or root), got=error.strerror,
            remedy="mend its permissions, or leave it out with --exclude",
        ) from None  # fmt: skip
    return Package(root, files)


def check_size(package: Package, limit_bytes: int = LIMIT_BYTES) -> None:
    """Refuse what the cluster would refuse after the upload.

    Raises:
        ConfigError: names the largest files.
    """
    if package.total_bytes <= limit_bytes:
        return
    shown = "; ".join(f"{name} {format_bytes(size)}" for name, size in package.largest())
    raise ConfigError(
        "the working directory is too large to be sent to the cluster",
        where=str(package.folder),
        got=f"{format_bytes(package.total_bytes)} in {len(package.files)} files, the largest: {shown}",
        wanted=f"at most {format_bytes(limit_bytes)}, what the cluster's dashboard takes",
        remedy="name what is not needed in .rayignore or with --exclude, put data on S3, or give --working-dir the "
        "s3:// URI of a zip archive",
    )


def _silent() -> logging.Logger:
    """The walk names each ignore file that it meets, and paths that it cannot read: the exception says that."""
    logger = logging.Logger("walk")
    logger.addHandler(logging.NullHandler())
    return logger

"""Rank-aware logging: rank 0 speaks, the others only when something is wrong. Layer 0.

Call `setup(rank)` once in a process; modules use `get(__name__)`. Loggers of boto3 and its parts are held at
INFO or above, because at DEBUG they print session tokens.
"""

from __future__ import annotations

import logging
import sys

_NOISY = ("botocore", "boto3", "s3transfer", "urllib3")


def get(name: str) -> logging.Logger:
    """The logger for a raydz module."""
    return logging.getLogger(name)


def setup(rank: int = 0, level: int = logging.INFO) -> None:
    """Send raydz's records to standard error; ranks other than 0 only from WARNING on.

    Calling it again (a new rank after a restart) replaces the handler.
    """
    root = logging.getLogger("raydz")
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s rank {rank} %(levelname)s %(message)s", datefmt="%H:%M:%S"))
    root.addHandler(handler)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger(name).level))

"""Rank-aware logging, as text or JSON: rank 0 speaks, the others only when something is wrong. Layer 0.

Call `setup(rank)` once in a process; modules use `get(__name__)`. Loggers of boto3 and its parts are held at
INFO or above, because at DEBUG they print session tokens.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

_NOISY = ("botocore", "boto3", "s3transfer", "urllib3")


def get(name: str) -> logging.Logger:
    """The logger for a raydz module."""
    return logging.getLogger(name)


def event(kind: str, fields: Mapping[str, Any]) -> None:
    """Log something that happened, for machines: a line where the log is JSON, nothing in the text for people.

    Args:
        fields: JSON values, without secrets.
    """
    get("raydz.events").info(kind, extra={"event": {"event": kind, **fields}})


def setup(rank: int = 0, level: int = logging.INFO, *, as_json: bool = False) -> None:
    """Send raydz's records to standard error; ranks other than 0 only from WARNING on.

    Calling it again (a new rank after a restart) replaces the handler.
    """
    root = logging.getLogger("raydz")
    root.setLevel(level if rank == 0 else max(level, logging.WARNING))
    root.propagate = False
    for handler in list(root.handlers):
        root.removeHandler(handler)
    handler = logging.StreamHandler(sys.stderr)
    if as_json:
        handler.setFormatter(_JsonLines(rank))
    else:
        text = f"%(asctime)s rank {rank} %(levelname)s %(message)s"
        handler.setFormatter(logging.Formatter(text, datefmt="%H:%M:%S"))
        handler.addFilter(lambda record: not hasattr(record, "event"))
    root.addHandler(handler)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(logging.INFO, logging.getLogger(name).level))


class _JsonLines(logging.Formatter):
    """One JSON object a record: time (Unix), level, rank, logger, message, and an event's fields."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname,
            "rank": self._rank,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json.dumps(getattr(record, "event", {}) | line, default=str)

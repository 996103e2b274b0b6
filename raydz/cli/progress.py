"""A bar for commands that move many bytes: on standard error, and only where that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Done = Callable[[int], None]
"""Told how many more bytes have been dealt with, from any thread."""


@contextmanager
def bytes_bar(total_bytes: int) -> Iterator[Done]:
    """What to tell, for the length of a with block."""
    if not sys.stderr.isatty():
        yield lambda num_bytes: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total_bytes)
        yield lambda num_bytes: progress.advance(task, num_bytes)

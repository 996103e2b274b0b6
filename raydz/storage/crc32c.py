"""CRC-32C by the processor's own instruction, where awscrt is installed.

Neighbours: `checkpoint/checksums.py` sums data files with it; what uploads send is in `s3_checksum.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def find_crc32c() -> Callable[[Any, int], int] | None:
    """(bytes-like, CRC of what came before) -> CRC of both; None without awscrt."""
    try:
        from awscrt.checksums import crc32c
    except ImportError:
        return None
    return crc32c

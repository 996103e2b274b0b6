"""The checksums of data files: CRC-32C by the processor's own instruction, CRC-32 where awscrt is not installed.

Neighbours: `data_file.py` sums what it writes by `default_algorithm`; `reader.py` and the tools verify by the name in
the manifest. See the note "Checksums" in README.md.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

from raydz.errors import CheckpointError
from raydz.storage.crc32c import find_crc32c

CrcFunction = Callable[[Any, int], int]
"""(bytes-like, CRC of what came before, 0 at the start) -> CRC of both."""


def default_algorithm() -> str:
    """What new files are summed with: crc32c with awscrt (it comes with `boto3[crt]`), else zlib's crc32."""
    return "crc32" if find_crc32c() is None else "crc32c"


def crc_function(algorithm: str, where: str) -> CrcFunction:
    """The function of an algorithm that a manifest names.

    Raises:
        CheckpointError: an unknown one, or crc32c where awscrt is not installed.
    """
    if algorithm == "crc32":
        return zlib.crc32
    if algorithm != "crc32c":
        raise CheckpointError("unknown checksum", where=where, got=algorithm, wanted="crc32 or crc32c")
    found = find_crc32c()
    if found is None:
        raise CheckpointError(
            "the checksums of this checkpoint need awscrt", where=where, got=algorithm, wanted="the package awscrt",
            remedy="pip install 'boto3[crt]'",
        )  # fmt: skip
    return found

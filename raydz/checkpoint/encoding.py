"""How a manifest of format 2 writes what is long: columns of integers as text.

Neighbours: `manifest.py` alone. At 1,024 ranks a 70B model has a quarter of a million pieces, whose starts, stops and
offsets grow in equal steps: differences, deflated, are a hundredth of the same as JSON numbers. Checksums have no
pattern and are only packed. See the note "Scale" in README.md.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Sequence

import numpy as np

from raydz.errors import CheckpointError


def pack_column(values: Sequence[int]) -> str:
    """Integers of 64 bits: differences to the one before, little endian, deflated, base64."""
    steps = np.diff(np.asarray(values, "<i8"), prepend=np.int64(0)).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes(), 6)).decode()


def unpack_column(text: str, count: int, where: str) -> list[int]:
    """The integers of `pack_column`.

    Raises:
        CheckpointError: not `count` integers in that form; no more memory is taken than they need.
    """
    try:
        deflated = zlib.decompressobj()
        data = deflated.decompress(base64.b64decode(text, validate=True), 8 * count + 1)
        if len(data) != 8 * count:
            raise _not_a_column(where, f"{len(data)} bytes", f"{8 * count}")
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise _not_a_column(where, error, "deflated base64") from None
    return np.cumsum(np.frombuffer(data, "<i8")).tolist()


def pack_sums(values: Sequence[int]) -> str:
    """Checksums of 32 bits: little endian, base64."""
    return base64.b64encode(np.asarray(values, "<u4").tobytes()).decode()


def unpack_sums(text: str, where: str) -> tuple[int, ...]:
    """The checksums of `pack_sums`.

    Raises:
        CheckpointError: not in that form.
    """
    try:
        return tuple(np.frombuffer(base64.b64decode(text, validate=True), "<u4").tolist())
    except (ValueError, TypeError, binascii.Error) as error:
        raise _not_a_column(where, error, "base64 of 4 bytes each") from None


def _not_a_column(where: str, got: object, wanted: str) -> CheckpointError:
    return CheckpointError("a column of the manifest cannot be read", where=where, got=got, wanted=wanted)

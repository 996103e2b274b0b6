"""How a manifest of format 2 and the ranks' receipts write what is long: columns of integers as text.

Neighbours: `manifest.py` and `receipts.py`. At 1,024 ranks a 70B model has a quarter of a million pieces, whose starts,
stops and offsets grow in equal steps: differences, deflated, are a hundredth of the same as JSON numbers. Checksums
have no pattern and are only packed. See the note "Scale" in README.md.
"""

from __future__ import annotations

import base64
import binascii
import zlib

import numpy as np
import numpy.typing as npt

from raydz.checkpoint.columns import Sums
from raydz.errors import CheckpointError


def pack_column(values: npt.ArrayLike, level: int = 6) -> str:
    """Integers of 64 bits: differences to the one before, little endian, deflated, base64.

    Shape: (n,), or (columns, n): one column behind the other, each with its own differences.
    """
    steps = np.diff(np.asarray(values, "<i8"), axis=-1, prepend=np.int64(0)).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes(), level)).decode()


def unpack_column(text: str, count: int, where: str) -> npt.NDArray[np.int64]:
    """The integers of `pack_column`, (count,).

    Raises:
        CheckpointError: not `count` integers in that form; no more memory is taken than they need.
    """
    return unpack_columns(text, 1, count, where)[0]


def unpack_columns(text: str, columns: int, count: int, where: str) -> npt.NDArray[np.int64]:
    """The integers of `pack_column`, (columns, count).

    Raises:
        CheckpointError: not so many integers in that form; no more memory is taken than they need.
    """
    num_bytes = 8 * columns * count
    try:
        deflated = zlib.decompressobj()
        data = deflated.decompress(base64.b64decode(text, validate=True), num_bytes + 1)
        if len(data) != num_bytes:
            raise _not_a_column(where, f"{len(data)} bytes", f"{num_bytes}")
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise _not_a_column(where, error, "deflated base64") from None
    return np.cumsum(np.frombuffer(data, "<i8").reshape(columns, count), axis=1, dtype=np.int64)


def pack_sums(values: Sums) -> str:
    """Checksums of 32 bits: little endian, base64."""
    return base64.b64encode(values.to_bytes()).decode()


def unpack_sums(text: str, where: str) -> Sums:
    """The checksums of `pack_sums`.

    Raises:
        CheckpointError: not in that form.
    """
    try:
        return Sums.from_bytes(base64.b64decode(text, validate=True))
    except (ValueError, TypeError, binascii.Error) as error:
        raise _not_a_column(where, error, "base64 of 4 bytes each") from None


def _not_a_column(where: str, got: object, wanted: str) -> CheckpointError:
    return CheckpointError("a column of the manifest cannot be read", where=where, got=got, wanted=wanted)

"""Which checksum goes with an upload, and how parts' checksums become the whole object's.

Neighbours: `s3_client` picks one; `s3_writer` sends it with each put, part and completion. See the note
"Checksums" in README.md.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

from raydz.errors import ConfigError
from raydz.storage.options import S3Options

_BYTES = {"crc64nvme": 8, "crc32c": 4, "crc32": 4}


@dataclass(frozen=True)
class Checksum:
    """One algorithm; `name` is that of `S3Options.checksum`."""

    name: str

    @property
    def field(self) -> str:
        """The parameter that carries the value in requests."""
        return f"Checksum{self.name.upper()}"

    def of(self, data: Any) -> int:
        """The checksum of a buffer."""
        from awscrt import checksums

        return getattr(checksums, self.name)(data)

    def join(self, first: int, second: int, second_bytes: int) -> int:
        """The checksum of two pieces one after the other, from the pieces' own: no second pass over the data."""
        from awscrt import checksums

        return getattr(checksums, f"combine_{self.name}")(first, second, second_bytes)

    def value(self, number: int) -> dict[str, str]:
        """The request parameter for a checksum that is known."""
        return {self.field: base64.b64encode(number.to_bytes(_BYTES[self.name], "big")).decode()}


def pick_checksum(options: S3Options, is_aws: bool) -> Checksum | None:
    """The algorithm to compute here, or None where boto3's default (or nothing) is sent.

    Raises:
        ConfigError: one was asked for by name, and awscrt is not installed.
    """
    has_awscrt = _has_awscrt()
    if options.checksum == "auto":
        return Checksum("crc64nvme") if is_aws and has_awscrt else None
    if options.checksum == "off":
        return None
    if not has_awscrt:
        raise ConfigError(
            "this checksum needs awscrt",
            where="storage.checksum",
            got=options.checksum,
            remedy="pip install 'boto3[crt]', or storage.checksum: auto",
        )
    return Checksum(options.checksum)


def _has_awscrt() -> bool:
    try:
        import awscrt.checksums  # noqa: F401
    except ImportError:
        return False
    return True

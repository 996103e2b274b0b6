"""Bytes, counts, FLOPs and durations as people write and read them. Layer 0."""

from __future__ import annotations

import re

from raydz.errors import ConfigError

_BYTE_FACTORS = {"": 1, "b": 1} | {
    unit: base**power
    for power, letter in enumerate("kmgt", start=1)
    for base, unit in ((1000, letter), (1000, letter + "b"), (1024, letter + "ib"))
}


def parse_bytes(text: str | int | float) -> int:
    """Read `64MiB`, `1.5 GB` or a plain number as bytes (decimal and binary prefixes are told apart).

    Raises:
        ConfigError: not a number with an optional unit of B, kB, MB, GB, TB, KiB, MiB, GiB, TiB.
    """
    if isinstance(text, (int, float)):
        return int(text)
    match = re.fullmatch(r"\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z]*)\s*", text.lower())
    if not match or match[2] not in _BYTE_FACTORS:
        raise ConfigError("not a size in bytes", got=repr(text), wanted="for example 64MiB, 1.5GB or 1048576")
    return int(float(match[1]) * _BYTE_FACTORS[match[2]])


_SECONDS = {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}


def parse_seconds(text: str) -> float:
    """Read `90s`, `15m`, `36h`, `2d` or a plain number as seconds.

    Raises:
        ConfigError: not a number with an optional unit of s, m, h, d.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", text.lower())
    if not match:
        raise ConfigError("not a duration", got=repr(text), wanted="for example 90s, 15m, 36h or 2d")
    return float(match[1]) * _SECONDS[match[2]]


def format_bytes(num_bytes: float) -> str:
    """`1536` -> `1.5 KiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def format_count(count: float) -> str:
    """`20500000` -> `20.5M`."""
    for unit in ("", "k", "M", "G"):
        if abs(count) < 1000:
            return f"{count:.0f}{unit}" if unit == "" else f"{count:.1f}{unit}"
        count /= 1000
    return f"{count:.1f}T"

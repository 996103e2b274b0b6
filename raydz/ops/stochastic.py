"""Rounding from fp32 to bf16 by chance, with random bits addressed by (seed, step, name, element). Layer 2.

Above: `operands.py`, `raydz.optim.widening`. Below: `native/stochastic.hpp`, the same in C++. README.md, "Stochastic
rounding", has the generator and why the result is unbiased.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch
from torch import Tensor

from raydz.ops.buffers import check_buffer

LANES = 4
"""Tensors beside each other whose rounding one word of 64 bits decides, 16 bits each."""

_WORD = 1 << 64
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class Noise(NamedTuple):
    """The random words of a call's elements: of element i, that of (`key`, `first` + i)."""

    key: int
    first: int = 0


def noise_key(seed: int, step: int, name: str) -> int:
    """Where the words of a tensor in a step begin."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{step}/{name}".encode(), digest_size=8).digest(), "little")


@torch.no_grad()
def random_words(key: int, start: int, stop: int, device: torch.device) -> Tensor:
    """Words of elements [start, stop), (n,) int64: SplitMix64 at the counters key + (element + 1) * step.

    Source: Steele, Lea and Flood 2014, Fast splittable pseudorandom number generators; the constants are Stafford's.
    """
    z = torch.arange(start + 1, stop + 1, dtype=torch.int64, device=device)  # products wrap, as unsigned ones do
    z = z * _signed(_STEP) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


@torch.no_grad()
def round_stochastic(source: Tensor, words: Tensor, lane: int, out: Tensor) -> None:
    """Round each fp32 value to one of its two bf16 neighbours, to the farther one with the chance that it is near.

    A value that bf16 has stays; infinities stay, and NaN stays a NaN. What lies above bf16's largest number may become
    infinite, as with any rounding.

    Shape: all (n,). Dtype: source fp32, out bf16, words as `random_words` gives them.

    Args:
        lane: which 16 bits of each word decide, below `LANES`.

    Raises:
        LayoutError: a dtype, a length or a device does not fit.
    """
    check_buffer("source", source, (torch.float32,))
    check_buffer("words", words, (torch.int64,), source)
    check_buffer("out", out, (torch.bfloat16,), source)
    bits = source.view(torch.int32)
    chance = ((words >> (16 * lane)) & 0xFFFF).to(torch.int32)
    kept = torch.where(source.isnan(), (bits >> 16) | 0x0040, bits >> 16)
    rounded = torch.where(source.isfinite(), (bits + chance) >> 16, kept)
    out.view(torch.int16).copy_(rounded.to(torch.int16))


def _signed(value: int) -> int:
    """The int64 with these 64 bits."""
    return value - _WORD if value >= _WORD // 2 else value


def _shifted(z: Tensor, count: int) -> Tensor:
    """Shift right, with zeros from the left."""
    return (z >> count) & ((1 << (64 - count)) - 1)

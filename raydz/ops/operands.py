"""What an optimizer's step reads and writes, and its walk over them in torch: the frame of every reference. Layer 2.

Above: `adamw.py`, `elementwise.py`. Below: `rounding.py`, `stochastic.py`. `native/block.hpp` does the same in C++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from raydz.errors import LayoutError
from raydz.ops.buffers import FLOATS, HALVES, check_buffer
from raydz.ops.rounding import merge_reference, round_reference, split_reference
from raydz.ops.stochastic import Noise, random_words, round_stochastic

_PIECE_NUMEL = 1 << 16  # the references work on pieces whose temporaries stay in the cache
_FP32, _BF16, _INT16 = (torch.float32,), (torch.bfloat16,), (torch.int16,)


class Into(NamedTuple):
    """Second buffers, which receive what becomes of a step's master, low and states; those it reads stay as they are.

    Shape, dtype: of the buffers that they stand for. They must not overlap them.
    """

    master: Tensor
    low: Tensor | None = None
    states: tuple[Tensor, ...] = ()

    def slice(self, start: int, stop: int) -> Into:
        """The same memory, elements [start, stop)."""
        low = None if self.low is None else self.low[start:stop]
        return Into(self.master[start:stop], low, tuple(state[start:stop] for state in self.states))


class Operands(NamedTuple):
    """Weights in one of their forms, a gradient and states.

    Shape: all of one length, contiguous, on one device; they must not overlap.
    Dtype: `master` fp32; or bf16 with `low` (int16), as `split_master` made them; or bf16 alone, then it is rounded by
        chance. `grad` fp32, bf16 or fp16. `states` fp32, or bf16, rounded by chance. `out`, bf16 or fp16, receives the
        updated weight (bf16 as `round_bf16` rounds).
    """

    master: Tensor
    grad: Tensor
    states: tuple[Tensor, ...] = ()
    low: Tensor | None = None
    out: Tensor | None = None

    def check(self, state_names: tuple[str, ...], *, has_noise: bool, into: Into | None = None) -> None:
        """Refuse what no implementation may touch.

        Raises:
            LayoutError: a dtype, a length or a device does not fit; bf16 alone without noise is a wrong dtype; `into`
                is not like what it stands for, or overlaps it.
        """
        alone = (torch.float32, torch.bfloat16) if has_noise else _FP32
        check_buffer("master", self.master, alone if self.low is None else _BF16)
        check_buffer("grad", self.grad, FLOATS, self.master)
        for name, state in zip(state_names, self.states, strict=True):
            check_buffer(name, state, alone, self.master)
        if self.low is not None:
            check_buffer("low", self.low, _INT16, self.master)
        if self.out is not None:
            check_buffer("out", self.out, HALVES, self.master)
        if into is not None:
            self._check_into(into, state_names)

    def _check_into(self, into: Into, state_names: tuple[str, ...]) -> None:
        if (into.low is None) != (self.low is None) or len(into.states) != len(self.states):
            raise LayoutError("second buffers stand for other parts than there are", where="into")
        pairs = {"master": (into.master, self.master)}
        if into.low is not None and self.low is not None:
            pairs["low"] = (into.low, self.low)
        pairs |= dict(zip(state_names, zip(into.states, self.states, strict=True), strict=True))
        for name, (theirs, ours) in pairs.items():
            check_buffer(f"into.{name}", theirs, (ours.dtype,), ours)
            gap = abs(theirs.data_ptr() - ours.data_ptr())
            if gap < ours.numel() * ours.element_size():
                raise LayoutError("a second buffer overlaps the first", where=f"into.{name}", got=f"{gap} bytes apart")

    def copied(self, into: Into | None) -> Operands:
        """The same step in place, on `into` after it received what is here: for who cannot write apart."""
        if into is None:
            return self
        into.master.copy_(self.master)
        if into.low is not None and self.low is not None:
            into.low.copy_(self.low)
        for theirs, ours in zip(into.states, self.states, strict=True):
            theirs.copy_(ours)
        return self._replace(master=into.master, low=into.low, states=into.states)

    def for_kernel(self) -> tuple[Any, ...]:
        """In the order of the functions of `raydz._native`."""
        parts = (self.master, self.low, self.grad, *self.states, self.out)
        return tuple(part if part is None else part.detach() for part in parts)

    def pieces(self) -> Iterator[tuple[int, Operands]]:
        """(start, views) of consecutive parts; on an accelerator one part, since each costs a dozen launches."""
        numel = self.master.numel()
        piece = _PIECE_NUMEL if self.master.device.type == "cpu" else max(numel, 1)
        for start in range(0, numel, piece):
            part = slice(start, start + piece)
            yield (
                start,
                Operands(
                    self.master.view(-1)[part],
                    self.grad.view(-1)[part],
                    tuple(state.view(-1)[part] for state in self.states),
                    None if self.low is None else self.low.view(-1)[part],
                    None if self.out is None else self.out.view(-1)[part],
                ),
            )


def walk(operands: Operands, grad_scale: float, noise: Noise | None, update: Callable[..., None]) -> int | Tensor:
    """Run `update(p, g, *states)`, in place on fp32 tensors, over all pieces; returns the count of non-finite `g`."""
    num_nonfinite = torch.zeros((), dtype=torch.int64, device=operands.master.device)
    for start, o in operands.pieces():
        p = o.master.to(torch.float32) if o.low is None else _merged(o.master, o.low)
        g = o.grad.to(torch.float32) * grad_scale
        states = [state.to(torch.float32) for state in o.states]
        num_nonfinite += (~g.isfinite()).sum()
        update(p, g, *states)
        if o.low is not None:
            split_reference(p, o.master, o.low)
        if noise is not None:
            _round_all(o, p, states, Noise(noise.key, noise.first + start))
        if o.out is not None:
            _cast(p, o.out)
    return num_nonfinite if num_nonfinite.is_cuda else int(num_nonfinite)


def _round_all(o: Operands, p: Tensor, states: list[Tensor], noise: Noise) -> None:
    """Lane 0 of the words rounds the master, lane 1 + k state k."""
    kept = [(o.master, p, 0)] if o.master.dtype == torch.bfloat16 and o.low is None else []
    kept += [
        (state, wide, lane)
        for lane, (state, wide) in enumerate(zip(o.states, states, strict=True), start=1)
        if state.dtype == torch.bfloat16
    ]
    if kept:
        words = random_words(noise.key, noise.first, noise.first + p.numel(), p.device)
        for out, values, lane in kept:
            round_stochastic(values, words, lane, out)


def _merged(hi: Tensor, low: Tensor) -> Tensor:
    out = torch.empty_like(hi, dtype=torch.float32)
    merge_reference(hi, low, out)
    return out


def _cast(source: Tensor, out: Tensor) -> None:
    if out.dtype == torch.bfloat16:
        round_reference(source, out)
    else:
        out.copy_(source)

"""Recomputation of activations, block by block: nothing is kept, or what is dear to compute is.

Neighbours: `decoder.py` and `engine.py` call `wrap_blocks`; `blocks.py` puts the forward in place. See "Recomputation"
in README.md.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from raydz.errors import ConfigError
from raydz.models.blocks import BlockForward, find_blocks, refuse_inner_units
from raydz.offload.activations import ActivationOffload

MODES = ("none", "full", "selective")

_aten = torch.ops.aten
_KEPT = {
    _aten.mm.default,
    _aten.addmm.default,
    _aten.bmm.default,
    _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_fused_attention_overrideable.default,
}
"""Results that `selective` keeps: matrix products and attention. All else is elementwise or a norm."""


def as_mode(value: bool | str) -> str:
    """The mode that a value of `activation_checkpointing` means: true is `full`, false is `none`.

    Raises:
        ConfigError: it means none.
    """
    mode = ("none", "full")[value] if isinstance(value, bool) else value
    if mode not in MODES:
        raise ConfigError(
            "unknown activation checkpointing", where="activation_checkpointing", got=value, wanted=", ".join(MODES)
        )
    return mode


def recomputing(forward: Callable[..., Any], mode: str, offload: ActivationOffload | None = None) -> Callable[..., Any]:
    """`forward`, run in such a way that backward computes again what `mode` does not keep.

    Args:
        offload: where tensors among the arguments wait for backward; None: where they are.
    """
    if mode == "none":
        return forward
    options: dict[str, Any] = {"use_reentrant": False}
    if mode == "selective":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, **options, **kwargs)

    def recomputed_from_host(*args: Any, **kwargs: Any) -> Any:
        names, num_args = list(kwargs), len(args)  # checkpoint keeps keywords out of reach of hooks

        def positional(*values: Any) -> Any:
            return forward(*values[:num_args], **dict(zip(names, values[num_args:], strict=True)))

        values = (*args, *kwargs.values())
        assert offload is not None
        with offload.leaving([value for value in values if isinstance(value, Tensor)]):
            return checkpoint(positional, *values, **options)

    return recomputed if offload is None else recomputed_from_host


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def wrap_blocks(model: nn.Module, mode: bool | str, patterns: Sequence[str] | None = None) -> list[str]:
    """Recompute the blocks of any model in backward while it trains; returns their names.

    Parameters, names and the `state_dict` stay; gradients are the same bits. May be called again with the same mode.

    Args:
        patterns: `parallel.units`, where it is set.

    Raises:
        ConfigError: an unknown mode; a model without blocks; a block that recomputes in another way already; or, in any
            mode, what `refuse_inner_units` refuses.
    """
    mode = as_mode(mode)
    blocks = [] if mode == "none" else find_blocks(model, patterns)
    if not blocks and mode != "none":
        raise ConfigError(
            "the model has no blocks to recompute", where="parallel.activation_checkpointing", got=mode,
            wanted="an nn.ModuleList of blocks", remedy="name modules in parallel.units",
        )  # fmt: skip
    for block in blocks:
        forward = BlockForward.of(block.module)
        if forward.mode not in ("none", mode):
            raise ConfigError(
                "two kinds of activation checkpointing for one block", where=block.name, got=f"{forward.mode}, {mode}",
                remedy="set one of model.activation_checkpointing and parallel.activation_checkpointing",
            )  # fmt: skip
        forward.recompute(mode, partial(recomputing, mode=mode))
    refuse_inner_units(model, patterns)
    return [block.name for block in blocks]


def offload_inputs(model: nn.Module, offload: ActivationOffload, patterns: Sequence[str] | None = None) -> list[str]:
    """Keep the inputs of the blocks that are recomputed in host memory until backward; returns the blocks' names.

    Args:
        patterns: `parallel.units`, where it is set.

    Raises:
        ConfigError: a block is compiled.
    """
    names = []
    for block in find_blocks(model, patterns):
        forward = block.module.__dict__.get("forward")
        if isinstance(forward, BlockForward) and forward.mode != "none":
            forward.offload_inputs(partial(recomputing, mode=forward.mode, offload=offload))
            names.append(block.name)
    return names

"""The activation formula against what autograd really keeps of raydz's decoder."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raydz.config import load
from raydz.plan.activations import Workload, activation_bytes, kept_bytes, loss_bytes
from raydz.plan.model import decoder_sizes, workload
from raydz.plan.shapes import DecoderSizes
from tests.plan.measuring import saved_for_backward

SIZES = [DecoderSizes(500, 128, 3, 4, 2, 352), DecoderSizes(96, 64, 2, 4, 4, 200)]
ROWS, LENGTH = 2, 64


def saved_bytes(sizes: DecoderSizes, dtype: torch.dtype, recomputes: str, loss_chunk: int = 0) -> int:
    return saved_for_backward(Workload(sizes, LENGTH, ROWS, recomputes, loss_chunk=loss_chunk), dtype, "cpu")


@pytest.mark.parametrize("recomputes", ["none", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", SIZES)
def test_what_lives_after_the_forward_is_what_autograd_saves(sizes, dtype: torch.dtype, recomputes) -> None:
    work = Workload(sizes, LENGTH, ROWS, recomputes)
    # Of the loss only the log-probabilities and labels live then; the other two thirds come in backward.
    logits = work.tokens * (4 * sizes.vocab_size + 8)
    planned = kept_bytes(work, dtype.itemsize) + logits
    assert planned == pytest.approx(saved_bytes(sizes, dtype, recomputes), rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_in_chunks_keeps_gradients_and_no_logits(dtype: torch.dtype) -> None:
    sizes = SIZES[0]
    work = Workload(sizes, LENGTH, ROWS, loss_chunk=16)
    gradient = 4 * sizes.vocab_size * sizes.hidden_size  # of the head's weight, fp32; that of the hidden is in the norm
    planned = kept_bytes(work, dtype.itemsize) + gradient
    assert planned == pytest.approx(saved_bytes(sizes, dtype, "none", 16), rel=0.01)


def test_recomputing_one_block_needs_what_that_block_keeps_without_recomputation() -> None:
    sizes = SIZES[0]
    three, two = (Workload(replace(sizes, num_layers=layers), LENGTH, ROWS) for layers in (3, 2))
    block = activation_bytes(three, 2) - activation_bytes(two, 2)
    full = replace(three, recomputes="full")
    assert activation_bytes(full, 2) - kept_bytes(full, 2) == block
    assert kept_bytes(full, 2) < kept_bytes(replace(three, recomputes="selective"), 2) < kept_bytes(three, 2)


def test_repeated_heads_are_as_wide_as_the_queries() -> None:
    work = Workload(SIZES[0], LENGTH, ROWS)
    grouped, repeated = (activation_bytes(replace(work, repeats_heads=value), 2) for value in (False, True))
    sizes = SIZES[0]
    keys_and_values = 2 * (sizes.num_heads - sizes.num_kv_heads) * sizes.head_dim
    assert repeated - grouped == work.tokens * sizes.num_layers * 2 * keys_and_values


def test_only_cuda_in_fp32_repeats_heads() -> None:
    config = load({"model": {"hidden_size": 64}, "train_batch_size": 4})
    half = load({"model": {"hidden_size": 64}, "train_batch_size": 4, "bf16": {"enabled": True}})
    sizes = decoder_sizes(config)
    repeats = [workload(c, sizes, device).repeats_heads for c in (config, half) for device in ("cpu", "cuda")]
    assert repeats == [False, True, False, False]


def test_everything_but_the_masks_grows_with_the_tokens() -> None:
    work = Workload(SIZES[0], LENGTH, ROWS)
    assert activation_bytes(replace(work, rows=4 * ROWS), 2) == 4 * activation_bytes(work, 2)
    assert loss_bytes(replace(work, rows=4 * ROWS), 2) == 4 * loss_bytes(work, 2)
    longer = replace(work, length=2 * LENGTH, rows=1)
    masks = SIZES[0].num_layers * work.tokens * LENGTH * 2
    assert activation_bytes(longer, 2) == activation_bytes(work, 2) + masks


def test_chunks_bound_the_logits_by_the_weight() -> None:
    work = Workload(SIZES[0], LENGTH, 1000 * ROWS, loss_chunk=128)
    assert loss_bytes(work, 4) - 8 * work.tokens <= 3 * 4 * SIZES[0].vocab_size * SIZES[0].hidden_size
    assert loss_bytes(work, 4) < loss_bytes(replace(work, loss_chunk=0), 4) / 100

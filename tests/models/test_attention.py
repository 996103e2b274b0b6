"""Which kernel runs, and that the choice does not change what is computed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from raydz.models import Decoder, DecoderShape
from raydz.models import attention as attention_module
from raydz.models.attention import AttentionCase, AttentionChoice, attend, choose, document_mask

SHAPE = DecoderShape(
    vocab_size=7, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, intermediate_size=8
)


def case(kv_heads: int, masked: bool) -> AttentionCase:
    return AttentionCase(4, kv_heads, 8, torch.float32, torch.device("cpu"), masked)


def inputs(kv_heads: int, t: int = 7) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(2, heads, t, 8, requires_grad=True) for heads in (4, kv_heads, kv_heads))


def plain_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    k, v = (x.double().repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
    scores = (q.double() @ k.transpose(-1, -2) / 8**0.5).masked_fill(~mask, float("-inf"))
    return scores.softmax(-1) @ v


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_causal_and_masked_paths_agree_with_plain_attention_and_each_other(kv_heads: int) -> None:
    q, k, v = inputs(kv_heads)
    mask = document_mask(torch.zeros(2, 7, dtype=torch.long))
    wanted = plain_attention(q, k, v, mask)
    results = [attend(q, k, v, m, repeats_heads=repeats) for m in (None, mask) for repeats in (False, True)]
    *grads, oracle = [torch.autograd.grad(out.square().sum(), (q, k, v)) for out in (*results, wanted)]
    for out, grad in zip(results, grads, strict=True):
        torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
        for left, right in zip(grad, oracle, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_the_kernel_that_is_named_is_the_one_that_runs() -> None:
    """Oracle: torch's profiler over a call of the same shape."""
    from torch.profiler import ProfilerActivity, profile

    q, k, v = inputs(2)
    for mask in (None, document_mask(torch.zeros(2, 7, dtype=torch.long))):
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            attend(q, k, v, mask)
        ran = {event.key for event in seen.key_averages()}
        assert choose(case(2, mask is not None)) == AttentionChoice("flash (cpu)", False)
        assert "aten::_scaled_dot_product_flash_attention_for_cpu" in ran


def test_a_kernel_that_makes_all_scores_is_called_plain() -> None:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    with sdpa_kernel(SDPBackend.MATH):
        assert choose.__wrapped__(case(4, True)) == AttentionChoice("plain", False)
        assert choose.__wrapped__(case(2, True)) == AttentionChoice("plain", False)


REAL = F.scaled_dot_product_attention


def without_sharing(q, k, v, *, attn_mask, is_causal, enable_gqa):
    """As a GPU's kernels in fp32: with shared heads only the plain one runs."""
    if enable_gqa:
        scores = (q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).transpose(-1, -2)) / q.shape[-1] ** 0.5
        mask = attn_mask if attn_mask is not None else torch.ones_like(scores, dtype=torch.bool).tril()
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        return weights @ v.repeat_interleave(q.shape[1] // v.shape[1], 1)
    return REAL(q, k, v, attn_mask=attn_mask, is_causal=is_causal)


def never_shared_by_the_decoder(q, k, v, **options):
    """Rows of the decoder are shorter than the row of zeros that finds the kernel."""
    assert q.shape[2] > 100 or not options["enable_gqa"]
    return without_sharing(q, k, v, **options)


def without_masks(q, k, v, *, attn_mask, is_causal, enable_gqa):
    """Only the plain kernel takes a mask."""
    return (
        without_sharing(q, k, v, attn_mask=attn_mask, is_causal=False, enable_gqa=True)
        if attn_mask is not None
        else (REAL(q, k, v, is_causal=is_causal, enable_gqa=enable_gqa))
    )


@pytest.fixture
def kernels(monkeypatch):
    """Stand in for another device's kernels."""

    def set_kernels(function) -> None:
        choose.cache_clear()
        monkeypatch.setattr(attention_module.F, "scaled_dot_product_attention", function)

    yield set_kernels
    choose.cache_clear()


@pytest.mark.parametrize("masked", [False, True])
def test_heads_are_repeated_where_only_that_escapes_the_plain_kernel(kernels, masked: bool) -> None:
    kernels(without_sharing)
    assert choose(case(2, masked)) == AttentionChoice("flash (cpu)", True)
    assert choose(case(4, masked)) == AttentionChoice("flash (cpu)", False)


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_the_decoder_follows_the_choice_and_computes_the_same(kernels, mode: str) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, activation_checkpointing=mode))
    ids, documents = torch.randint(0, 7, (2, 6)), torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0]])
    for args in ((ids,), (ids, None, documents)):
        choose.cache_clear()
        outs = [model(*args)]
        kernels(never_shared_by_the_decoder)
        outs.append(model(*args))
        kernels(REAL)
        grads = [torch.autograd.grad(out.square().sum(), list(model.parameters())) for out in outs]
        torch.testing.assert_close(outs[0], outs[1], rtol=1e-5, atol=1e-6)
        for left, right in zip(*grads, strict=True):
            torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)


def test_a_decoder_says_both_kernels_where_they_differ(kernels) -> None:
    cpu = torch.device("cpu")
    assert Decoder(SHAPE).describe_attention(torch.bfloat16, cpu) == "flash (cpu)"
    kernels(without_masks)
    said = Decoder(SHAPE).describe_attention(torch.float32, cpu)
    assert said == "flash (cpu); plain where a row holds several documents"

"""The loss is a sum over labels that count."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raydz.models import IGNORE_INDEX, Decoder, DecoderShape, causal_lm_loss, chunked_cross_entropy
from raydz.models.head import OutputHead
from tests.models.live_bytes import LiveBytes
from tests.zero.models import VOCABULARY
from tests.zero.training import Run, assert_close, token_loss, train_with_engine, train_with_torch


def batch(labels: list[list[int]]) -> dict[str, torch.Tensor]:
    shape = (len(labels), len(labels[0]))
    zeros = torch.zeros(shape, dtype=torch.long)
    return {"input_ids": zeros, "labels": torch.tensor(labels), "position_ids": zeros + 1, "document_ids": zeros + 2}


def test_losses_of_counted_labels_are_added() -> None:
    logits = torch.log(torch.tensor([[[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]]))
    loss = causal_lm_loss(lambda *a, **k: logits, batch([[0, IGNORE_INDEX, 2]]))
    assert abs(float(loss) - (-math.log(0.5) - math.log(0.6))) < 1e-6


def test_a_row_without_labels_gives_zero_and_a_graph() -> None:
    logits = torch.randn(1, 2, 3, requires_grad=True)
    loss = causal_lm_loss(lambda *a, **k: logits, batch([[IGNORE_INDEX, IGNORE_INDEX]]))
    loss.backward()
    assert loss.item() == 0.0 and logits.grad.eq(0).all()


def test_rows_that_are_not_there_give_zero_and_a_graph() -> None:
    logits = torch.randn(0, 2, 3, requires_grad=True)
    empty = {key: value[:0] for key, value in batch([[0, 1]]).items()}
    loss = causal_lm_loss(lambda *a, **k: logits, empty)
    loss.backward()
    assert loss.item() == 0.0


def test_the_sum_is_fp32_whatever_the_model_computes_in() -> None:
    logits = torch.zeros(1, 2, 3, dtype=torch.bfloat16)
    loss = causal_lm_loss(lambda *a, **k: logits, batch([[0, 1]]))
    assert loss.dtype == torch.float32 and abs(float(loss) - 2 * math.log(3)) < 1e-6


def test_positions_and_documents_reach_the_model() -> None:
    seen = {}

    def model(ids, **kwargs):
        seen.update(kwargs)
        return torch.zeros(1, 2, 3)

    causal_lm_loss(model, batch([[0, 1]]))
    assert seen["position_ids"].tolist() == [[1, 1]] and seen["document_ids"].tolist() == [[2, 2]]


# -- in chunks ---------------------------------------------------------------------------------------------------------


def problem(
    n: int, d: int, v: int, dtype: torch.dtype, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(n, d, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(v, d, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, v, (n,), generator=generator)
    labels[::3] = IGNORE_INDEX
    return hidden, weight, labels


def plain_loss(hidden: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.linear(hidden, weight).double(), labels, ignore_index=IGNORE_INDEX, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 4, 7, 10, 64])
@pytest.mark.parametrize("n", [0, 1, 10])
def test_chunks_give_the_loss_and_gradients_of_whole_logits(n: int, chunk: int) -> None:
    """Oracle: torch's cross-entropy in fp64; fp64 chunks too, so that only a wrong formula can differ."""
    hidden, weight, labels = problem(n, 5, 9, torch.float64)
    found, wanted = chunked_cross_entropy(hidden, weight, labels, chunk), plain_loss(hidden, weight, labels)
    torch.testing.assert_close(found, wanted)
    for left, right in zip(*(torch.autograd.grad(3 * x, (hidden, weight)) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize(
    # The loss sums 40 terms of magnitude 10. fp32: 2^-23 relative in each of a few operations. bf16: logits are rounded
    # alike in both; a gradient is a sum of 40 weights of magnitude 1 times probabilities rounded by 2^-9.
    ("dtype", "loss_rtol", "grad_rtol", "grad_atol"),
    [(torch.float32, 2e-6, 1e-5, 1e-5), (torch.bfloat16, 2e-6, 2**-7, 2**-5)],
)
def test_chunks_equal_torchs_cross_entropy_within_rounding(dtype, loss_rtol, grad_rtol, grad_atol) -> None:
    hidden, weight, labels = problem(60, 16, 37, dtype)
    found = chunked_cross_entropy(hidden, weight, labels, 8)
    wanted = F.cross_entropy(
        F.linear(hidden, weight).float(), labels, ignore_index=IGNORE_INDEX, reduction="sum"
    )  # fmt: skip
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=loss_rtol, atol=0)
    for left, right in zip(*(torch.autograd.grad(x, (hidden, weight)) for x in (found, wanted)), strict=True):
        assert left.dtype == dtype
        torch.testing.assert_close(left, right, rtol=grad_rtol, atol=grad_atol)


def test_weight_gradients_of_bf16_chunks_are_added_in_fp32() -> None:
    """512 tokens that push one row by the same 1/4096: in bf16 the sum would stop to grow at 1/16."""
    hidden, weight = torch.full((512, 1), 2.0**-12, dtype=torch.bfloat16), torch.zeros(2, 1, dtype=torch.bfloat16)
    weight.requires_grad_()
    chunked_cross_entropy(hidden, weight, torch.zeros(512, dtype=torch.long), 1).backward()
    assert weight.grad[:, 0].tolist() == [-(2.0**-4), 2.0**-4]


@pytest.mark.parametrize("frozen", ["hidden", "weight", "both"])
def test_frozen_inputs_get_no_gradient_and_change_nothing(frozen: str) -> None:
    hidden, weight, labels = problem(10, 5, 9, torch.float64)
    grads = torch.autograd.grad(plain_loss(hidden, weight, labels), (hidden, weight))
    wanted = dict(zip(("hidden", "weight"), grads, strict=True))
    inputs = {"hidden": hidden.detach(), "weight": weight.detach()}
    trained = [name for name in inputs if frozen not in (name, "both")]
    for name in trained:
        inputs[name].requires_grad_()
    loss = chunked_cross_entropy(inputs["hidden"], inputs["weight"], labels, 4)
    torch.testing.assert_close(loss, plain_loss(hidden, weight, labels))
    assert loss.requires_grad == bool(trained)
    if trained:
        loss.backward()
    for name, tensor in inputs.items():
        if name in trained:
            torch.testing.assert_close(tensor.grad, wanted[name])


def test_backward_twice_over_a_kept_graph_gives_the_same_again() -> None:
    hidden, weight, labels = problem(10, 5, 9, torch.float32)
    loss = chunked_cross_entropy(hidden, weight, labels, 4)
    first = torch.autograd.grad(loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(loss, (hidden, weight))
    assert all(torch.equal(left, right) for left, right in zip(first, second, strict=True))


def test_infinite_logits_of_an_ignored_position_do_not_spoil_the_sum() -> None:
    hidden, weight, labels = problem(4, 5, 9, torch.float32)
    with torch.no_grad():
        hidden[0] = float("inf")  # its label is ignored
    loss = chunked_cross_entropy(hidden, weight, labels, 2)
    loss.backward()
    assert loss.isfinite() and hidden.grad[1:].isfinite().all()


def test_a_label_outside_the_vocabulary_is_an_error() -> None:
    hidden, weight, labels = problem(4, 5, 9, torch.float32)
    for wrong in (9, -1):
        labels[1] = wrong
        with pytest.raises((IndexError, RuntimeError)):
            chunked_cross_entropy(hidden, weight, labels, 2)


def test_logits_never_cost_more_than_the_chunk() -> None:
    """512 tokens, 16 wide, 1000 words: whole logits are 2 MB, of which plain torch holds three; a chunk is 64 kB."""
    hidden, weight, labels = problem(512, 16, 1000, torch.float32)
    logits_bytes = 4 * 512 * 1000
    peaks = {}
    for name, chunk in (("chunks", 16), ("whole", 0)):
        head = OutputHead(16, 1000, chunk)
        head.weight = nn.Parameter(weight.detach())
        with LiveBytes(hidden, labels, head.weight) as live:
            head(hidden[None], labels[None]).backward()
        peaks[name] = live.peak
    gradients = 4 * (512 * 16 + 1000 * 16)
    assert peaks["whole"] > 2 * logits_bytes
    assert peaks["chunks"] < 2 * gradients + 4 * (4 * 16 * 1000) < logits_bytes / 2, peaks


# -- in the head and the decoder ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("wanted", "chunk"), [("auto", 24), (7, 7), (0, 0)])
def test_a_chunk_is_as_long_as_the_head_is_wide_unless_said(wanted, chunk: int) -> None:
    assert OutputHead(24, 9, wanted).chunk_tokens(torch.float32) == chunk
    assert OutputHead(4096, 1, "auto").chunk_tokens(torch.bfloat16) == 2048


def test_fp16_takes_whole_logits_so_that_the_loss_scale_reaches_them() -> None:
    assert OutputHead(24, 9).chunk_tokens(torch.float16) == 0
    assert OutputHead(24, 9, 5).chunk_tokens(torch.float16) == 5


SHAPE = DecoderShape(
    vocab_size=23, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    intermediate_size=24,
)  # fmt: skip


class LogitsOnly(nn.Module):
    """The same decoder behind a face that knows no labels, so that the loss is taken over whole logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.inner = model

    def forward(self, ids, **kwargs):
        return self.inner(ids, **kwargs)


@pytest.mark.parametrize("is_tied", [False, True])
def test_the_decoder_computes_the_loss_of_its_own_logits(is_tied: bool) -> None:
    torch.manual_seed(0)
    model = Decoder(replace(SHAPE, tie_word_embeddings=is_tied, loss_chunk_tokens=3)).double()
    data = batch([[1, IGNORE_INDEX, 5, 22], [0, 3, 3, IGNORE_INDEX]])
    wanted = causal_lm_loss(LogitsOnly(model), data)
    found = causal_lm_loss(model, data)
    assert model.lm_head.weight is model.model.embed_tokens.weight or not is_tied
    torch.testing.assert_close(found, wanted)
    parameters = list(model.parameters())
    for left, right in zip(*(torch.autograd.grad(x, parameters) for x in (found, wanted)), strict=True):
        torch.testing.assert_close(left, right)


# -- under the engine --------------------------------------------------------------------------------------------------


class Oracle(Decoder):
    """The decoder that returns logits alone, over which the loss functions of `tests.zero.training` take the loss."""

    returns_loss_sum = False

    def forward(self, ids, **kwargs):
        return super().forward(ids)


def make(is_tied: bool, is_oracle: bool) -> nn.Module:
    shape = replace(SHAPE, vocab_size=VOCABULARY, tie_word_embeddings=is_tied, loss_chunk_tokens=3)
    return (Oracle if is_oracle else Decoder)(shape)


def decoder_loss(model, micro: dict, rank: int, step: int) -> torch.Tensor:
    names = {"position_ids": None, "document_ids": None}
    return causal_lm_loss(model, {"input_ids": micro["ids"], "labels": micro["labels"], **names})


@pytest.mark.parametrize("is_tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", range(4))
def test_chunks_train_like_whole_logits_of_plain_torch(ranks, stage: int, is_tied: bool) -> None:
    """The head's weight must be gathered while its loss runs, also where it is the root's."""
    run = Run(partial(make, is_tied, False), decoder_loss, stage=stage)
    found = ranks(2).run(train_with_engine, run)[0]
    assert_close(found, train_with_torch(run.with_(model=partial(make, is_tied, True), loss=token_loss), 2))

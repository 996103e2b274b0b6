"""The decoder against a plain one, and the rules of documents and positions."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from raydz.models import Decoder, DecoderShape
from raydz.models.attention import document_mask
from tests.models.plain_decoder import plain_logits

SHAPE = DecoderShape(
    vocab_size=7, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=10, rope_theta=50.0, rms_norm_eps=1e-3,
)  # fmt: skip
SHAPES = [
    SHAPE,
    replace(SHAPE, tie_word_embeddings=True),
    replace(SHAPE, hidden_size=24, num_attention_heads=6, num_key_value_heads=3),
    replace(SHAPE, num_key_value_heads=2, num_hidden_layers=1),
    replace(SHAPE, activation_checkpointing=True),
]
IDS = torch.tensor([[3, 1, 4, 1, 5, 2], [6, 5, 3, 5, 0, 2]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2], [0, 1, 0, 1, 2, 3]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1, 1], [4, 4, 2, 2, 2, 2]])


def build(shape: DecoderShape, dtype: torch.dtype = torch.float64) -> Decoder:
    torch.manual_seed(1)
    model = Decoder(shape).to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return model


def plain_batch(model: Decoder, ids: Tensor, positions: Tensor, documents: Tensor) -> Tensor:
    p = dict(model.named_parameters())
    rows = zip(ids.tolist(), positions.tolist(), documents.tolist(), strict=True)
    return torch.stack([plain_logits(p, model.shape, *row) for row in rows])


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("has_documents", [False, True])
def test_logits_and_gradients_are_those_of_the_plain_decoder(shape: DecoderShape, has_documents: bool) -> None:
    model = build(shape)
    weights = torch.randn(*IDS.shape, shape.vocab_size, dtype=torch.float64)
    if has_documents:
        logits = model(IDS, position_ids=POSITIONS, document_ids=DOCUMENTS)
        wanted = plain_batch(model, IDS, POSITIONS, DOCUMENTS)
    else:
        logits = model(IDS)
        wanted = plain_batch(model, IDS, torch.arange(6).expand(2, 6), torch.zeros(2, 6))
    # Angles are computed in fp32: 5 radians at most, so 2^-22 of absolute error in each rotation.
    torch.testing.assert_close(logits, wanted, rtol=0, atol=2e-6)
    parameters = dict(model.named_parameters())
    found = torch.autograd.grad((logits * weights).sum(), list(parameters.values()))
    oracle = torch.autograd.grad((wanted * weights).sum(), list(parameters.values()))
    for name, left, right in zip(parameters, found, oracle, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=2e-5, msg=name)


def test_a_document_does_not_see_the_one_before_it() -> None:
    model = build(SHAPE, torch.float32)
    changed = IDS.clone()
    changed[:, :2] = (changed[:, :2] + 1) % 7
    left, right = (model(ids, position_ids=POSITIONS, document_ids=DOCUMENTS) for ids in (IDS, changed))
    assert torch.equal(left[0, 3:], right[0, 3:]) and torch.equal(left[1, 2:], right[1, 2:])
    assert not torch.equal(left[0, 2], right[0, 2])  # within the document it does
    assert not torch.equal(model(IDS)[0, 3:], model(changed)[0, 3:])  # and without ids all is one document


def test_a_token_does_not_see_later_ones() -> None:
    model = build(SHAPE, torch.float32)
    changed = IDS.clone()
    changed[:, 4] = (changed[:, 4] + 1) % 7
    for documents in (None, DOCUMENTS):
        left, right = (model(ids, document_ids=documents) for ids in (IDS, changed))
        torch.testing.assert_close(left[:, :4], right[:, :4], rtol=0, atol=1e-6)
        assert not torch.allclose(left[:, 4:], right[:, 4:], atol=1e-3)


def test_a_packed_document_is_computed_as_if_it_were_alone() -> None:
    model = build(SHAPE)
    packed = model(IDS, position_ids=POSITIONS, document_ids=DOCUMENTS)
    torch.testing.assert_close(packed[0, 3:], model(IDS[:1, 3:])[0], rtol=0, atol=1e-6)
    torch.testing.assert_close(packed[1, 2:], model(IDS[1:, 2:])[0], rtol=0, atol=1e-6)


def test_only_differences_of_positions_count() -> None:
    model = build(SHAPE)
    torch.testing.assert_close(model(IDS), model(IDS, position_ids=torch.arange(6).expand(2, 6) + 3), rtol=0, atol=1e-5)
    stretched = model(IDS, position_ids=2 * torch.arange(6).expand(2, 6))
    assert not torch.allclose(model(IDS), stretched, atol=1e-3)


@pytest.mark.parametrize("has_documents", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_a_rank_without_rows_takes_part_with_zero_gradients(has_documents: bool, recomputes: bool) -> None:
    model, none = build(replace(SHAPE, activation_checkpointing=recomputes)), torch.zeros(0, 6, dtype=torch.long)
    logits = model(none, position_ids=none, document_ids=none if has_documents else None)
    assert logits.shape == (0, 6, 7)
    logits.sum().backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_the_mask_lets_a_query_see_earlier_keys_of_its_document() -> None:
    mask = document_mask(torch.tensor([[0, 0, 5, 5, 0]]))
    assert mask.shape == (1, 1, 5, 5)
    assert mask[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [1, 1, 0, 0, 1],
    ]  # fmt: skip


def test_names_are_those_of_hugging_faces_llama() -> None:
    names = {name for name, _ in Decoder(SHAPE).named_parameters()}
    block = {
        "input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
    }  # fmt: skip
    assert names == {
        "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight",
        *(f"model.layers.{i}.{part}.weight" for i in range(2) for part in block),
    }  # fmt: skip


def test_flops_are_counted_by_hand() -> None:
    # Matrices of a block: q 12x12, k and v 6x12 each, o 12x12, three of 10x12: 144 + 72 + 72 + 144 + 360 = 792.
    # Head 7x12 = 84. 6 (2 * 792 + 84) = 10008. Attention: for each layer 12 * T * 12 forward and backward, halved
    # by causality: 6 * 2 * 12 * T.
    assert Decoder(SHAPE).flops_per_token(5) == 10_008 + 6 * 2 * 12 * 5
    assert Decoder(replace(SHAPE, tie_word_embeddings=True)).flops_per_token(0) == 10_008


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.input_layernorm.weight"])
def test_norms_start_at_one(name: str) -> None:
    assert Decoder(SHAPE).initial_values(name, 2, 9, seed=0).tolist() == [1.0] * 7


def test_initial_values_have_the_range_and_do_not_depend_on_slicing() -> None:
    model = Decoder(replace(SHAPE, initializer_range=0.5))
    whole = model.initial_values("lm_head.weight", 0, 40_000, seed=3)
    assert 0.49 < whole.std() < 0.51
    parts = [model.initial_values("lm_head.weight", a, b, seed=3) for a, b in ((0, 1), (1, 17), (17, 40_000))]
    assert torch.equal(torch.cat(parts), whole)

"""The loss is a sum over labels that count."""

from __future__ import annotations

import math

import torch

from raydz.models import IGNORE_INDEX, causal_lm_loss


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

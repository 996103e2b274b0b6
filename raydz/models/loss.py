"""The loss of next-token prediction, as a sum; the loop divides it once for the whole step.

Neighbours: `train/loop.py` calls `causal_lm_loss` with the engine in the model's place; `head.py` computes the loss
where the head's weight is. See "Loss" in README.md.

Shapes in comments: N tokens, D hidden, V vocabulary, C tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

IGNORE_INDEX = -100
"""Label of positions that do not count."""


def causal_lm_loss(model: Callable[..., Tensor], batch: Mapping[str, Any]) -> Tensor:
    """Sum of -log p(label) in nats over all positions whose label is not `IGNORE_INDEX`.

    A model (or the module of an engine) with a true attribute `returns_loss_sum` is given the labels and returns the
    sum itself; from any other it is taken over the logits.

    Shape: batch has input_ids, labels, position_ids, document_ids, each (B, T), document_ids None where each row is
    one document; labels are already shifted. Dtype: fp32, whatever the model computes in.
    """
    inputs = {"position_ids": batch["position_ids"], "document_ids": batch["document_ids"]}
    if getattr(getattr(model, "module", model), "returns_loss_sum", False):
        return model(batch["input_ids"], **inputs, labels=batch["labels"])
    logits = model(batch["input_ids"], **inputs)
    return cross_entropy_sum(logits.flatten(0, 1), batch["labels"].flatten())


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """The loss over whole logits. Shape: logits (N, V), labels (N,) -> scalar. Dtype: fp32 or what is wider."""
    return F.cross_entropy(logits.to(_wide(logits)), labels, ignore_index=IGNORE_INDEX, reduction="sum")


def chunked_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
    """`cross_entropy_sum(hidden @ weight.T, labels)` that holds the logits of `chunk_tokens` tokens at a time.

    Gradients are made in the forward and kept: (N, D) in the dtype of `hidden` and (V, D) in fp32, in which chunks are
    added. Backward only scales them, and needs no weight.

    Shape: hidden (N, D), weight (V, D), labels (N,) -> scalar. Dtype: fp32 or what is wider.
    """
    return _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk_tokens)


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        wide = _wide(hidden)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk_tokens):
            part = slice(start, start + chunk_tokens)
            logits = F.linear(hidden[part], weight)  # (C, V)
            if not (needs_hidden or needs_weight):
                loss += cross_entropy_sum(logits, labels[part])
                continue
            chunk_loss, grad = _loss_and_gradient(logits, labels[part])
            del logits
            loss += chunk_loss
            ignored = (labels[part] == IGNORE_INDEX)[:, None]  # their rows of `grad` are not zero
            if grad_hidden is not None:
                torch.mm(grad, weight, out=grad_hidden[part]).masked_fill_(ignored, 0)
            if grad_weight is not None:
                _add_product(grad_weight, grad.t(), hidden[part].masked_fill(ignored, 0))
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = (grad_hidden * grad_loss).to(grad_hidden.dtype)
        if grad_weight is not None:
            grad_weight = (grad_weight * grad_loss).to(ctx.weight_dtype)
        return grad_hidden, grad_weight, None, None


def _loss_and_gradient(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Loss sum of a chunk, and the gradient of each token's loss for its logits, in their dtype."""
    ignored = (labels == IGNORE_INDEX)[:, None]
    index = labels[:, None].masked_fill(ignored, 0)
    log_probs = torch.log_softmax(logits, -1, dtype=_wide(logits))
    picked = log_probs.gather(-1, index)
    if log_probs.dtype == logits.dtype:
        grad = log_probs.exp_()
    else:  # fp32 within, and half of the memory to go through
        grad = torch.softmax(logits, -1)
    grad.scatter_(-1, index, picked.expm1().to(grad.dtype))  # p - 1, exact also where p is nearly 1
    return -picked.masked_fill(ignored, 0).sum(), grad


def _add_product(out: Tensor, left: Tensor, right: Tensor) -> None:
    if out.dtype == left.dtype:
        out.addmm_(left, right)
    else:
        out += left @ right


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)

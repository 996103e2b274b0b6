"""The loss of next-token prediction, as a sum; the loop divides it once for the whole step.

Neighbours: `train/loop.py` calls this with the engine in the model's place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100
"""Label of positions that do not count."""


def causal_lm_loss(model: Callable[..., Tensor], batch: Mapping[str, Tensor]) -> Tensor:
    """Sum of -log p(label) in nats over all positions whose label is not `IGNORE_INDEX`.

    Shape: batch has input_ids, labels, position_ids, document_ids, each (B, T); labels are already shifted.
    Dtype: fp32, whatever the model computes in.
    """
    logits = model(batch["input_ids"], position_ids=batch["position_ids"], document_ids=batch["document_ids"])
    return F.cross_entropy(
        logits.flatten(0, 1).float(), batch["labels"].flatten(), ignore_index=IGNORE_INDEX, reduction="sum"
    )

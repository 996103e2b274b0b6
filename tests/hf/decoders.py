"""Small decoders, trained or not, and what transformers makes of their exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from raydz.models import Decoder, DecoderShape

SHAPE: dict[str, Any] = {
    "vocab_size": 53, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
    "intermediate_size": 40, "rope_theta": 500.0, "rms_norm_eps": 1e-6,
}  # fmt: skip


def decoder(**changes: Any) -> Decoder:
    """With values that are far from those of initialisation, norms among them."""
    model, generator = Decoder(DecoderShape(**{**SHAPE, **changes})), torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else 0.2 * noise)
    return model.eval()


def tokens() -> Tensor:
    return torch.randint(0, SHAPE["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(4))


@torch.no_grad()
def transformers_logits(folder: Path, ids: Tensor) -> Tensor:
    """By `AutoModelForCausalLM`, which must find every weight and know every one it finds."""
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    return model.eval()(ids).logits


def engine_of(model: Decoder, stage: int, **sections: Any):
    """An engine over the model in this process group."""
    import raydz.engine

    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 8},
        **sections,
    }
    return raydz.engine.initialize(model, config, device="cpu")


def train_and_save(rank: int, world_size: int, changes: dict[str, Any], stage: int, uri: str, options=None) -> list:
    """A step of training, a checkpoint, and the logits of the weights that it holds."""
    engine = engine_of(decoder(**changes), stage)
    ids = tokens()
    engine.backward(engine(ids, labels=ids) / ids.numel())
    engine.step()
    engine.save_checkpoint(uri, options=options)
    engine.eval()
    with torch.no_grad():
        logits = engine(ids)
    engine.destroy()
    return logits.tolist()

"""Tiny models of Hugging Face's families as transformers builds them, and their training in one process of torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from tests.optim.references import by_decay
from tests.zero.training import LR, assert_close_weights, numpy_weights

VOCABULARY, ROWS, LENGTH, STEPS = 32, 4, 6, 3
_SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "bos_token_id": 1,
    "eos_token_id": 2, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
_EXPERTS = {"num_experts_per_tok": 2}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", _SIZES),
    "llama-tied": ("Llama", _SIZES | {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", _SIZES | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", _SIZES | {"head_dim": 8}),
    "gemma2": ("Gemma2", _SIZES | {"head_dim": 8}),
    "gpt2": ("GPT2", _GPT2),
    "mixtral": ("Mixtral", _SIZES | _EXPERTS | {"num_local_experts": 4, "output_router_logits": True}),
    "qwen3-moe": ("Qwen3Moe", _SIZES | _EXPERTS | {"head_dim": 8, "num_experts": 4, "moe_intermediate_size": 16}),
}


@dataclass(frozen=True)
class Case:
    """A family and how it is trained."""

    family: str
    stage: int = 3
    lora: bool = False
    bf16: bool = False
    recompute: bool = False
    generates: bool = False
    optimizer: str = "AdamW"

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def config(self) -> dict[str, Any]:
        params: dict[str, Any] = {"lr": LR, "eps": 1e-4, "weight_decay": 0.1}
        return {
            "train_batch_size": ROWS,
            "gradient_clipping": 0.5,
            "optimizer": {"type": self.optimizer, "params": params},
            "bf16": {"enabled": self.bf16},
            "zero_optimization": {"stage": self.stage},
        }


def build(case: Case) -> nn.Module:
    """The same values everywhere, large enough for gradients to be seen."""
    torch.manual_seed(0)
    name, sizes = FAMILIES[case.family]
    kind = getattr(transformers, name + ("LMHeadModel" if name == "GPT2" else "ForCausalLM"))
    model = kind(getattr(transformers, name + "Config")(**sizes, initializer_range=0.3))
    if case.lora:
        model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=3, target_modules=["q_proj", "down_proj"]))
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, which would leave lora_A without a gradient
                nn.init.normal_(parameter, std=0.3)
    if case.recompute:
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
    return model.train()


def ids_of(step: int) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def prompt() -> Tensor:
    return torch.arange(3, 7)[None]


def generate(model: nn.Module) -> list[int]:
    """Greedily, always as many tokens."""
    was_training = model.training
    model.eval()
    out = model.generate(input_ids=prompt(), attention_mask=torch.ones(1, 4), max_new_tokens=5, min_new_tokens=5,
                         do_sample=False)  # fmt: skip
    model.train(was_training)
    return out[0].tolist()


@dataclass
class Outcome:
    weights: dict[str, np.ndarray]
    losses: list[float]
    generated: list[list[int]]


def start(case: Case, model: nn.Module | None = None):
    import raydz.engine

    return raydz.engine.initialize(build(case) if model is None else model, case.config(), device="cpu")


def train_with_engine(rank: int, world_size: int, case: Case) -> Outcome:
    """Runs on every rank; rank 0's outcome has the weights."""
    engine, losses, generated = start(case), [], []
    for step in range(STEPS):
        mine = ids_of(step).chunk(world_size)[rank]
        loss = engine(input_ids=mine, labels=mine).loss
        engine.backward(loss)
        engine.step()
        rows = engine.comms.world.all_gather_values([loss.item()])
        losses.append(sum(row[0] for row in rows) / world_size)
        if case.generates:
            generated.append(generate(engine.module))
    outcome = Outcome(numpy_weights(engine), losses, generated)
    engine.destroy()
    return outcome


def train_with_torch(case: Case, world_size: int) -> Outcome:
    """The mean of the losses of all ranks' rows, in one graph."""
    model = build(case)
    groups = by_decay((p for p in model.parameters() if p.requires_grad), 0.1)
    optimizer, losses, generated = torch.optim.AdamW(groups, lr=LR, eps=1e-4), [], []
    for step in range(STEPS):
        parts = [model(input_ids=ids, labels=ids).loss for ids in ids_of(step).chunk(world_size)]
        loss = torch.stack(parts).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if case.generates:
            generated.append(generate(model))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return Outcome({n: t.detach().float().numpy().copy() for n, t in tensors}, losses, generated)


def assert_equal_training(found: Outcome, wanted: Outcome) -> None:
    np.testing.assert_allclose(found.losses, wanted.losses, rtol=5e-6)
    assert_close_weights(found.weights, wanted.weights)
    assert found.generated == wanted.generated

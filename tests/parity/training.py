"""The same small training run by raydz's engine on N ranks and by plain torch in one process: the parity oracle."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

SHAPE = dict(
    vocab_size=7, hidden_size=12, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=10,
)  # fmt: skip
STEPS, ROWS, LENGTH = 4, 12, 5  # 12 rows divide over 1, 2, 3 and 4 ranks


@dataclass(frozen=True)
class Case:
    """One cell of the contract's matrix."""

    stage: int = 0
    accumulation: int = 1
    boundary: bool = False
    bf16: bool = False
    bucket: int | None = None
    persistence: int | None = None
    prefetch: int | None = None
    tied: bool = False
    checkpointing: bool = False
    ordered: bool = False
    shard_size: int | None = None
    clip: float = 0.5
    weight_decay: float = 0.1

    def with_(self, **changes) -> Case:
        return replace(self, **changes)


@dataclass
class Outcome:
    """What a run left: weights by name, and per step the loss (a mean over tokens) and gradient norm."""

    weights: dict[str, np.ndarray]
    losses: list[float]
    norms: list[float]


def batch_for(step: int) -> dict[str, Tensor]:
    """Rows whose numbers of valid labels differ (so a mean of means would be wrong); the same for everyone."""
    generator = torch.Generator().manual_seed(100 + step)
    ids = torch.randint(0, SHAPE["vocab_size"], (ROWS, LENGTH + 1), generator=generator)
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, LENGTH - row % LENGTH :] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def build_model(case: Case, device: str):
    from raydz.models import Decoder, DecoderShape

    shape = DecoderShape(
        **SHAPE, tie_word_embeddings=case.tied, activation_checkpointing=case.checkpointing, initializer_range=0.3
    )
    with torch.device(device):
        return Decoder(shape)


def loss_sum(model, batch) -> Tensor:
    logits = model(batch["input_ids"])
    labels = batch["labels"].flatten().to(logits.device)
    return F.cross_entropy(logits.flatten(0, 1).float(), labels, ignore_index=-100, reduction="sum")


def train_with_engine(rank: int, world_size: int, case: Case, device: str = "cpu") -> Outcome | None:
    """Runs on every rank of a pool; rank 0 returns the outcome."""
    import raydz.engine
    from raydz.config import load_engine

    zero = {"stage": case.stage, "reduce_bucket_size": case.bucket, "stage3_prefetch_bucket_size": case.prefetch}
    zero["stage3_param_persistence_threshold"] = case.persistence
    config = load_engine(
        {
            "train_batch_size": ROWS,
            "gradient_accumulation_steps": case.accumulation,
            "gradient_clipping": case.clip,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": case.weight_decay}},
            "bf16": {"enabled": case.bf16},
            "zero_optimization": {k: v for k, v in zero.items() if v is not None},
            "parallel": {
                "gradient_reduction": "boundary" if case.boundary else "micro_batch",
                "ordered_collectives": True if case.ordered else "auto",
                "shard_size": case.shard_size,
            },
        }
    )
    engine = raydz.engine.initialize(build_model(case, "meta"), config, device=device)
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        batch = batch_for(step)
        mine = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
        valid = float((batch["labels"] != -100).sum())
        local = 0.0
        for i in range(case.accumulation):
            micro = {key: value.chunk(case.accumulation)[i] for key, value in mine.items()}
            loss = loss_sum(engine, micro)
            engine.backward(loss, denominator=valid)
            local += loss.item()
            report = engine.step()
        losses.append(sum(row[0] for row in engine.comms.reduce.all_gather_values([local])) / valid)
        norms.append(report.grad_norm)
    weights = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}
    engine.destroy()
    return Outcome(weights, losses, norms) if rank == 0 else None


def train_with_torch(case: Case) -> Outcome:
    """Plain torch, one process, fp32, the whole batch at once: the oracle."""
    model = build_model(case, "cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(model.initial_values(name, 0, parameter.numel(), 0).view_as(parameter))
    decayed = [p for p in model.parameters() if p.dim() > 1]
    plain = [p for p in model.parameters() if p.dim() <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": case.weight_decay}, {"params": plain, "weight_decay": 0.0}], lr=1e-2
    )
    losses, norms = [], []
    for step in range(1, STEPS + 1):
        batch = batch_for(step)
        valid = (batch["labels"] != -100).sum()
        loss = loss_sum(model, batch) / valid
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), case.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome({n: p.detach().numpy().copy() for n, p in model.named_parameters()}, losses, norms)


def describe(case: Case) -> str:
    """A short id for pytest."""
    default = asdict(Case())
    changed = {key: value for key, value in asdict(case).items() if value != default[key]}
    return (
        "-".join(f"{key}{int(value) if isinstance(value, bool) else value}" for key, value in changed.items()) or "base"
    )

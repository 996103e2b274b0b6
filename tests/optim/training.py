"""One training by each optimizer, sharded over N ranks by raydz's engine and in plain torch in one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tests.optim.references import Both, ExactMuon, Lion, by_decay
from tests.zero.models import Plain
from tests.zero.training import Outcome, Run, batch_for, build, num_labels, numpy_weights, part, train_step

LR, DECAY = 1e-2, 0.1


@dataclass(frozen=True)
class Case:
    """An optimizer's section, and how it is run."""

    name: str
    stage: int = 0
    bf16: bool = False
    bucket: int | None = None
    grouped: bool = False
    accumulation: int = 1
    schedule: bool = False
    shard_size: int | None = None
    ns_method: str = "gram"
    keys: tuple[str, ...] = ()
    """Of `bf16`, that are true."""
    seed: int = 0
    model: Callable[[], nn.Module] = Plain

    def with_(self, **changes: Any) -> Case:
        return replace(self, **changes)

    def run(self) -> Run:
        zero = (("reduce_bucket_size", self.bucket),) if self.bucket else ()
        return Run(self.model, stage=self.stage, bf16=self.bf16, zero=zero, accumulation=self.accumulation)


MUON = {"momentum": 0.9, "betas": (0.8, 0.9), "eps": 1e-4, "muon_lr": 3e-2, "adam_lr": 2e-2}
PARAMS: dict[str, dict[str, Any]] = {
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Lion": {"betas": (0.8, 0.9)},
    "Muon": MUON,
    "NAdam": {"eps": 1e-4},
    "RMSprop": {"momentum": 0.5, "eps": 1e-2},
    "Adagrad": {"eps": 1e-4},
    "AdamW": {"eps": 1e-4, "bias_correction": False},
}


def section(case: Case) -> dict[str, Any]:
    method = {"ns_method": case.ns_method} if case.name == "Muon" else {}
    return {"type": case.name, "params": {"lr": LR, "weight_decay": DECAY, **PARAMS[case.name], **method}}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Settings for parts of `Plain`: a decay for biases too, a rate of its own, and the rest."""
    first, head = model.layers[0], model.head
    special = {id(p) for p in [*first.parameters(), *head.parameters()]}
    rest = [p for p in model.parameters() if id(p) not in special]
    return [
        {"params": list(first.parameters()), "lr": 3 * LR, "weight_decay": 0.3},
        {"params": list(head.parameters()), "lr": 0.0},
        {"params": rest},
    ]


def start(case: Case):
    import raydz.engine

    run = case.run()
    model = build(run)
    sections: dict[str, Any] = {"optimizer": section(case)}
    if case.schedule:
        params = {"warmup_min_lr": 0.0, "warmup_max_lr": LR, "warmup_num_steps": 2, "warmup_type": "linear"}
        sections["scheduler"] = {"type": "WarmupLR", "params": params}
    if case.keys:
        sections["bf16"] = {"enabled": True, **dict.fromkeys(case.keys, True)}
    if case.seed:
        sections["seed"] = case.seed
    if case.shard_size:
        sections["parallel"] = {"shard_size": case.shard_size}
    return raydz.engine.initialize(
        model, run.config() | sections, device="cpu", model_parameters=groups_of(model) if case.grouped else None
    )


def train_with_engine(rank: int, world_size: int, case: Case) -> Outcome:
    """Runs on every rank; rank 0's outcome has the weights."""
    run = case.run()
    engine, losses, norms = start(case), [], []
    for step in range(1, run.steps + 1):
        local, report = train_step(engine, run, rank, world_size, step)
        losses.append(
            sum(row[0] for row in engine.comms.reduce.all_gather_values([local])) / num_labels(batch_for(step))
        )
        norms.append(report.grad_norm)
    outcome = Outcome(numpy_weights(engine), losses, norms)
    engine.destroy()
    return outcome


def reference(case: Case, model: nn.Module) -> Any:
    """The optimizer in plain torch, with the same rules of weight decay."""
    params = {"lr": LR, **PARAMS[case.name]}
    groups = by_decay(model.parameters(), DECAY)
    if case.grouped:
        groups = [
            {"params": by["params"], "weight_decay": g.get("weight_decay", by["weight_decay"]), "lr": g.get("lr", LR)}
            for g in groups_of(model)
            for by in by_decay(g["params"], DECAY)
        ]
    if case.name == "Muon":
        return _muon(model, case.ns_method)
    kinds: dict[str, Callable[..., Any]] = {"Lion": Lion}
    return (kinds.get(case.name) or getattr(torch.optim, case.name))(groups, **params)


def _muon(model: nn.Module, ns_method: str) -> Both:
    matrices = [p for p in model.layers.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not m for m in matrices)]
    adam = torch.optim.AdamW(by_decay(rest, DECAY), lr=MUON["adam_lr"], betas=MUON["betas"], eps=MUON["eps"])
    kind = ExactMuon if ns_method == "gram" else torch.optim.Muon
    return Both(kind(matrices, lr=MUON["muon_lr"], momentum=MUON["momentum"], weight_decay=DECAY), adam)


def train_with_torch(case: Case, world_size: int) -> Outcome:
    """Plain torch in one process: the losses of all ranks in one graph."""
    run = case.run()
    model = build(run)
    optimizer, losses, norms = reference(case, model), [], []
    rates = [group["lr"] for group in getattr(optimizer, "param_groups", [])]
    for step in range(1, run.steps + 1):
        if case.schedule:  # steps 1 and 2 at the minimum, then half, then all of it
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * min(1.0, max(0.0, (step - 2) / 2))
        batch = batch_for(step)
        sums = [run.loss(model, part(batch, rank, world_size), rank, step) for rank in range(world_size)]
        loss = sum(sums[1:], sums[0]) / num_labels(batch)
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return Outcome({n: p.detach().numpy().copy() for n, p in model.named_parameters()}, losses, norms)

"""The oracle of 16-bit training: plain torch in one process, a 16-bit module beside fp32 masters, written by hand."""

from __future__ import annotations

import copy

import torch
from torch import nn

from tests.zero.training import Outcome, Run, batch_for, build, num_labels, part, torch_optimizer


def keep_fp32(module: nn.Module, dtype: torch.dtype) -> None:
    """Make one module compute in fp32 amid 16-bit neighbours."""
    module.float()
    inner = module.forward
    module.forward = lambda x: inner(x.float()).to(dtype)


def train_in_halves(
    run: Run, world_size: int, dtype: torch.dtype, *, scale: float = 1.0, fp32_modules: tuple[str, ...] = ()
) -> Outcome:
    """Losses, norms and masters of `run` with 16-bit weights and gradients, summed over ranks in fp32."""
    masters = build(run)
    optimizer, losses, norms = torch_optimizer(masters), [], []
    for step in range(1, run.steps + 1):
        model = copy.deepcopy(masters).to(dtype)
        for name in fp32_modules:
            exception = model.get_submodule(name)
            exception.load_state_dict(masters.get_submodule(name).state_dict())
            keep_fp32(exception, dtype)
            for to, source in zip(exception.parameters(), masters.get_submodule(name).parameters(), strict=True):
                to.data = source.detach().clone()
        batch, total = batch_for(step), 0.0
        for parameter in masters.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for rank in range(world_size):
            loss = run.loss(model, part(batch, rank, world_size), rank, step)
            (loss.float() / num_labels(batch) * scale).backward()
            total += loss.item()
            for (name, parameter), master in zip(model.named_parameters(), masters.parameters(), strict=True):
                assert name and parameter.grad is not None
                master.grad += parameter.grad.float()
                parameter.grad = None
        for master in masters.parameters():
            master.grad /= scale
        norms.append(float(nn.utils.clip_grad_norm_(masters.parameters(), run.clip)))
        optimizer.step()
        losses.append(total / num_labels(batch))
    return Outcome({n: p.detach().numpy().copy() for n, p in masters.named_parameters()}, losses, norms)

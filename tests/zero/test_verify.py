"""The self-check finds a broken reduction, and nothing where nothing is broken; it leaves no trace."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raydz.dist import Communicator
from raydz.errors import LayoutError
from raydz.zero.gradients import GroupGradients
from tests.zero.models import Adapted, OddSizes, Plain
from tests.zero.training import Run, batch_for, num_labels, owned_bytes, part, start, sum_loss, train_step


class Dropping(Plain):
    """Draws random numbers, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, ids: Tensor) -> Tensor:
        self.calls += 1
        x = self.drop(self.embed(ids))
        for block in self.layers:
            x = block(x)
        return self.head(self.norm(x))


def micro_loss(run: Run, rank: int, world_size: int, model, index: int) -> Tensor:
    micro = part(part(batch_for(1), rank, world_size), index, run.accumulation)
    return sum_loss(model(micro["ids"]), micro)


def verify(rank: int, world_size: int, run: Run, sections: dict, breakage: str = "", names=None) -> dict:
    """A check between two steps, with something broken or not."""
    engine = start(run, **sections)
    train_step(engine, run, rank, world_size, 1)
    buffers = {name: b.clone() for name, b in engine.module.named_buffers()}
    before = owned_bytes(engine), torch.get_rng_state().tolist()
    found: dict = {"error": ""}
    mend = BREAKAGES[breakage]()
    try:
        loss = partial(micro_loss, run, rank, world_size)
        report = engine.verify_step(loss, names=names, denominator=num_labels(batch_for(1)))
        found["report"] = (report.differences, report.tolerance)
    except LayoutError as error:
        found["error"] = str(error)
    finally:
        mend()
    found["untouched"] = (
        owned_bytes(engine) == before[0]
        and torch.get_rng_state().tolist() == before[1]
        and all(torch.equal(b, buffers[name]) for name, b in engine.module.named_buffers())
    )
    _, after = train_step(engine, run, rank, world_size, 2)
    found["norm"] = after.grad_norm
    engine.destroy()
    return found


def nothing():
    return lambda: None


def lose_a_rank():
    """The reduction of rank 0's shards misses the other ranks' gradients."""
    right = Communicator.reduce_scatter_flat

    def wrong(self, flat: Tensor, out: Tensor, **options):
        if self.rank == 0:
            own = out.numel() * self.rank
            kept = flat[own : own + out.numel()].float().clone()
            handle = right(self, flat, out, **options)
            handle.wait()
            out.copy_(kept)
            return handle
        return right(self, flat, out, **options)

    Communicator.reduce_scatter_flat = wrong
    return lambda: setattr(Communicator, "reduce_scatter_flat", right)


def lose_a_micro_batch():
    right = GroupGradients.accumulate

    def wrong(self, index: int, grad: Tensor) -> None:
        was_filled = self._filled[index]
        right(self, index, torch.zeros_like(grad) if was_filled else grad)

    GroupGradients.accumulate = wrong
    return lambda: setattr(GroupGradients, "accumulate", right)


def shift_by_one():
    """An element of a vector ends up beside its place."""
    right = GroupGradients.accumulate

    def wrong(self, index: int, grad: Tensor) -> None:
        is_norm = self.group.specs[index].name == "norm.weight"
        right(self, index, grad.roll(1) if is_norm else grad)

    GroupGradients.accumulate = wrong
    return lambda: setattr(GroupGradients, "accumulate", right)


BREAKAGES = {"": nothing, "rank": lose_a_rank, "micro_batch": lose_a_micro_batch, "shift": shift_by_one}

SECTIONS = [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True, "initial_scale_power": 8}}]


@pytest.mark.parametrize("sections", SECTIONS, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", range(4))
def test_a_sound_step_passes_and_leaves_no_trace(ranks, stage: int, sections: dict) -> None:
    run = Run(Dropping, stage=stage, accumulation=2, steps=2)
    plain = ranks(2).run(verify, run, sections)
    for found in plain:
        assert found["error"] == "" and found["untouched"]
        differences, tolerance = found["report"]
        assert set(differences) == {name for name, _ in Dropping().named_parameters()}
        assert max(differences.values()) <= tolerance < 0.05


@pytest.mark.parametrize("model", [OddSizes, Adapted, partial(Plain, tied=True)], ids=["odd", "frozen", "tied"])
def test_parameters_of_every_kind_are_compared(ranks, model) -> None:
    for found in ranks(3).run(verify, Run(model, stage=3), {}):
        assert found["error"] == "" and found["untouched"]
        assert len(found["report"][0]) == sum(p.requires_grad for p in model().parameters())


@pytest.mark.parametrize("sections", SECTIONS[:2], ids=["fp32", "bf16"])
@pytest.mark.parametrize("breakage", ["rank", "micro_batch", "shift"])
def test_a_broken_reduction_is_found_on_every_rank_and_named(ranks, breakage: str, sections: dict) -> None:
    run = Run(Plain, stage=1, accumulation=2)
    for found in ranks(2).run(verify, run, sections, breakage):
        assert "LayoutError" not in found["error"] and "gradients differ" in found["error"]
        assert ("norm.weight" in found["error"]) or breakage != "shift"
        assert found["untouched"]


def test_only_named_parts_are_compared(ranks) -> None:
    run = Run(Plain, stage=3)
    for found in ranks(2).run(verify, run, {}, "", ["layers.1", "*.bias"]):
        assert set(found["report"][0]) == {"layers.0.up.bias", "layers.1.up.weight", "layers.1.up.bias",
                                           "layers.1.down.weight", "norm.bias"}  # fmt: skip
    for found in ranks(2).run(verify, run, {}, "shift", ["layers.1"]):
        assert found["error"] == ""


def test_replicas_of_a_shard_group_are_counted(ranks) -> None:
    for found in ranks(4).run(verify, Run(Plain, stage=3), {"parallel": {"shard_size": 2}}):
        assert found["error"] == "" and found["untouched"]


def test_fp32_exceptions_are_cast_in_the_copy_too(ranks) -> None:
    sections = {"bf16": {"enabled": True}, "parallel": {"fp32_modules": ["norm", "layers.0"]}}
    for found in ranks(2).run(verify, Run(Plain, stage=3), sections):
        assert found["error"] == ""

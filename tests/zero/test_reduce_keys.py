"""Keys about gradients and the update, each by its effect: bytes, dtypes, what travels, what is refused."""

from __future__ import annotations

import re
from functools import partial
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from raydz.dist import Communicator
from raydz.errors import TrainingError
from tests.zero.models import Optional, Plain
from tests.zero.test_accounting import BLOCKS, memory_run, sizes, wanted_elements
from tests.zero.training import (
    Run,
    assert_equal_bits,
    batch_for,
    numpy_weights,
    owned_bytes,
    part,
    start,
    token_loss,
    train_step,
    train_with_engine,
)

NUMEL = 5


class Products(nn.Module):
    """The gradient of its weight is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUMEL))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


def summed(rank: int, world_size: int, stage: int, micro_batches: list[list[float]], sections: dict) -> dict:
    """The step's sum of gradients that are `micro_batches[i][rank]`, its shard's dtype, and what travelled at most."""
    run = Run(Products, stage=stage, accumulation=len(micro_batches))
    sent, reduce = [], Communicator.reduce_scatter_flat

    def spy(self, flat: Tensor, out: Tensor, **kwargs):
        sent.append((str(flat.dtype), float(flat.float().abs().max())))
        return reduce(self, flat, out, **kwargs)

    with patch.object(Communicator, "reduce_scatter_flat", spy):
        engine = start(run, **sections)
        for values in micro_batches:
            engine.backward(engine(torch.full((NUMEL,), values[rank])), denominator=1)
            if values is not micro_batches[-1]:
                engine.step()
    grads = engine.sharded.gradients[0]
    found = {"dtype": str(grads.sums.dtype), "sent": sent, "skipped": engine.step().skipped}
    report = engine.last_report
    engine.destroy()
    return found | {"sum": report.grad_norm / NUMEL**0.5}


# -- prescale_gradients, gradient_predivide_factor ---------------------------------------------------------------

LARGE = 131072.0  # twice what fp16 holds
HALF_WIRE = {"communication_data_type": "fp16"}


@pytest.mark.parametrize("stage", range(4))
def test_a_predivide_factor_keeps_large_gradients_within_fp16_on_the_wire(ranks, stage: int) -> None:
    """Of a rank's g there travels 2 g / 16; the sum is exact, over ranks and micro-batches."""
    values = [[LARGE, LARGE], [LARGE, 0.0]]
    plain, divided = (
        ranks(2).run(summed, stage, values, HALF_WIRE | keys) for keys in ({}, {"gradient_predivide_factor": 16.0})
    )
    for found in plain:
        assert found["skipped"] and max(found["sent"]) == ("torch.float16", float("inf"))
    for found in divided:
        assert not found["skipped"]
        assert found["sum"] == pytest.approx(3 * LARGE, rel=1e-6)
    micro_batches_at_once = 1 if stage >= 2 else 2
    assert max(divided[0]["sent"]) == ("torch.float16", micro_batches_at_once * 2 * LARGE / 16)


def test_prescaled_gradients_are_divided_before_they_travel_whatever_the_factor(ranks) -> None:
    keys = {"gradient_predivide_factor": 8.0, "prescale_gradients": True}
    for found in ranks(2).run(summed, 2, [[3.0, 5.0]], keys):
        assert max(size for _, size in found["sent"]) in (3.0, 5.0) and found["sum"] == pytest.approx(8.0)


def test_the_factor_does_not_change_the_result(ranks) -> None:
    run = Run(Plain, stage=2, accumulation=2)
    changed = ranks(2).run(train_with_sections, run, {"gradient_predivide_factor": 4.0})[0]
    assert_equal_bits(changed, ranks(2).run(train_with_sections, run, {})[0])  # powers of two round nothing


def train_with_sections(rank: int, world_size: int, run: Run, sections: dict) -> dict:
    engine = start(run, **sections)
    for step in (1, 2, 3):
        train_step(engine, run, rank, world_size, step)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights


# -- grad_accum_dtype --------------------------------------------------------------------------------------------


def gradient_bytes(rank: int, world_size: int, run: Run, dtype: str) -> int:
    """Bytes of gradient buffers between two micro-batches."""
    engine = start(run, data_types={"grad_accum_dtype": dtype})
    micro = part(part(batch_for(1), rank, world_size), 0, 2)
    engine.backward(token_loss(engine, micro, rank, 1), denominator=1)
    tensors = [t for grads in engine.sharded.gradients for t in (grads._full, grads.reduced) if t is not None]
    engine.destroy()
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("dtype", "size"), [("fp32", 4), ("bf16", 2), ("fp16", 2)])
def test_micro_batches_add_up_in_buffers_of_the_accumulation_dtype(ranks, stage: int, dtype: str, size: int) -> None:
    embed, block, head, root = sizes(2)
    psi = embed + BLOCKS * block + head + root
    held = psi if stage < 2 else psi // 2
    run = memory_run(stage).with_(bf16=True, accumulation=2)
    assert ranks(2).run(gradient_bytes, run, dtype) == [held * size] * 2


@pytest.mark.parametrize("stage", range(4))
def test_ranks_are_summed_in_fp32_before_a_sum_is_rounded_to_bf16(ranks, stage: int) -> None:
    """1 + 2^-8 + 2^-8 is 1 when each addition rounds to bf16, and 1 + 2^-7, which bf16 has, when the sum does."""
    values = [[1.0, 2.0**-8, 2.0**-8], [0.0, 0.0, 0.0]]
    for found in ranks(3).run(summed, stage, values, {"data_types": {"grad_accum_dtype": "bf16"}}):
        assert found["sum"] == pytest.approx(1 + 2.0**-7, rel=1e-6)


def test_what_bf16_cannot_hold_is_lost_between_micro_batches(ranks) -> None:
    """So the buffers are used: 256 + 1 has nine bits."""
    values = [[256.0, 0.0], [1.0, 0.0]]
    for stage, dtype, total in [(1, "bf16", 256), (1, "fp32", 257), (2, "bf16", 256), (2, "fp32", 257)]:
        for found in ranks(2).run(summed, stage, values, {"data_types": {"grad_accum_dtype": dtype}}):
            assert found["sum"] == pytest.approx(total, rel=1e-6), (stage, dtype)


# -- reduce_scatter ----------------------------------------------------------------------------------------------


def all_reduced(rank: int, world_size: int, run: Run) -> tuple[list[int], dict]:
    engine, sent = start(run), []
    for step in (1, 2, 3):
        before = engine.clock.elements_sent
        train_step(engine, run, rank, world_size, step)
        sent.append(engine.clock.elements_sent - before)
    weights = numpy_weights(engine)
    engine.destroy()
    return sent, weights


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("stage", range(4))
def test_without_reduce_scatter_each_reduction_sends_twice_as_much_for_the_same_result(
    ranks, world: int, stage: int
) -> None:
    embed, block, head, root = sizes(world)
    psi = embed + BLOCKS * block + head + root
    run = memory_run(stage, reduce_scatter=False).with_(accumulation=2)
    reductions = {0: 0, 1: 1, 2: 2, 3: 2}[stage]  # stage 0 all-reduces anyway
    wanted = wanted_elements(stage, world, 2)[1] + reductions * psi * (world - 1) // world
    usual = ranks(world).run(train_with_engine, memory_run(stage).with_(accumulation=2))[0].weights
    for rank, (sent, weights) in enumerate(ranks(world).run(all_reduced, run)):
        assert sent[1:] == [wanted, wanted]
        if rank == 0:
            assert_equal_bits(weights, usual)


# -- ignore_unused_parameters ------------------------------------------------------------------------------------


def extra_on_last_rank(model, batch, rank: int, step: int) -> Tensor:
    uses = step == 2 or rank == 1
    logits = model(batch["ids"], uses_extra=uses)
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class AllUsed(Optional):
    def __init__(self) -> None:
        super().__init__()
        del self.never


def refusal(rank: int, world_size: int, run: Run, step: int) -> tuple[str, bool]:
    """What the step's error says, and whether weights and states are as before."""
    engine, text = start(run), ""
    before = owned_bytes(engine)
    try:
        train_step(engine, run, rank, world_size, step)
    except TrainingError as error:
        text = f"{error.where} | {error.got}"
    same = before == owned_bytes(engine)
    train_step(engine, run, rank, world_size, 2) if not text or "never" not in text else None
    engine.destroy()
    return text, same


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_parameters_without_a_gradient_are_named_on_every_rank(ranks, stage: int) -> None:
    run = Run(Optional, extra_on_last_rank, stage=stage, zero=(("ignore_unused_parameters", False),))
    for text, same in ranks(2).run(refusal, run, 2):
        assert text == "never.weight, never.bias | on ranks [0, 1]" and same


@pytest.mark.parametrize("stage", [1, 3])
def test_a_parameter_that_one_rank_does_not_use_is_named_on_both_and_the_next_step_works(ranks, stage: int) -> None:
    keys = {"ignore_unused_parameters": False, "stage3_param_persistence_threshold": 100}
    run = Run(AllUsed, extra_on_last_rank, stage=stage, zero=tuple(keys.items()))
    for text, same in ranks(2).run(refusal, run, 1):
        assert re.fullmatch(r"extra\.weight, extra\.bias \| on ranks \[0\]", text) and same


def test_where_all_are_used_nothing_is_refused(ranks) -> None:
    run = Run(Plain, stage=2, accumulation=2)
    found, wanted = (
        ranks(2).run(train_with_engine, r)[0] for r in (run.with_(zero=(("ignore_unused_parameters", False),)), run)
    )
    assert_equal_bits(found.weights, wanted.weights)


# -- sub_group_size ----------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "AdamW": {"lr": 1e-2},
    "SGD": {"lr": 1e-2, "momentum": 0.9},
    "Lion": {"lr": 1e-3},
    "Muon": {"lr": 1e-3},
}


def updated(rank: int, world_size: int, run: Run, optimizer: str) -> tuple[list[bytes], int, int]:
    """Bits after three steps, and the longest update and how many there were."""
    sections = {"optimizer": {"type": optimizer, "params": OPTIMIZERS[optimizer]}}
    if run.bf16:
        sections["bf16"] = {"enabled": True, "bf16_optimizer_states": optimizer == "AdamW"}
    engine, numels = start(run, **sections), []
    kind = type(engine.optimizer.optimizer)
    update = kind.update

    def spy(self, weights, *args):
        numels.append(weights.compute.numel())
        return update(self, weights, *args)

    with patch.object(kind, "update", spy):
        for step in (1, 2, 3):
            train_step(engine, run, rank, world_size, step)
    bits = owned_bytes(engine)
    engine.destroy()
    return bits, max(numels), len(numels)


@pytest.mark.parametrize(
    ("optimizer", "stage", "bf16"),
    [("AdamW", 3, True), ("AdamW", 0, False), ("SGD", 2, False), ("Lion", 1, True), ("Muon", 2, False)],
)
def test_the_update_runs_in_pieces_of_the_sub_group_size_with_equal_bits(
    ranks, optimizer: str, stage: int, bf16: bool
) -> None:
    run = Run(Plain, stage=stage, bf16=bf16)
    whole = ranks(2).run(updated, run, optimizer)
    pieces = ranks(2).run(updated, run.with_(zero=(("sub_group_size", 7),)), optimizer)
    for (bits, longest, count), (same_bits, longest_piece, more) in zip(whole, pieces, strict=True):
        assert longest > 7 >= longest_piece and more > count
        assert bits == same_bits


def largest_temporary(rank: int, world_size: int, sub_group_size: int) -> int:
    """Most bytes that one step takes beyond what there was, of 2^18 elements in one group.

    Adagrad is torch's; raydz's own optimizers take no temporaries on a CPU at all.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and not out._is_view() and out.untyped_storage()._cdata not in known:
                self.most = max(self.most, out.untyped_storage().nbytes())
            return out

    run = Run(partial(nn.Linear, 512, 512), stage=2, zero=(("sub_group_size", sub_group_size),))
    engine = start(run, optimizer={"type": "Adagrad", "params": {"lr": 0.1}})
    engine.backward(engine(torch.ones(1, 512)).sum())
    tensors = [t for g in engine.sharded.groups for t in (g.full, g.weights.compute)]
    tensors += [t for state in engine.optimizer.states for t in state.values()]
    tensors += [grads.reduced for grads in engine.sharded.gradients]
    known = {t.untyped_storage()._cdata for t in tensors if t is not None}
    with Largest() as seen:
        engine.optimizer.update(step=1, lr=0.1, grad_scale=0.5)
    engine.destroy()
    return seen.most


def test_a_sub_group_bounds_the_memory_that_an_update_takes(ranks) -> None:
    whole, pieces = (ranks(2).run(largest_temporary, size)[0] for size in (10**9, 4096))
    assert whole > 10 * pieces > 0 and pieces <= 4 * 4096

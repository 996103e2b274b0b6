"""ZeRO++: a second copy among near ranks (hpZ) changes no bit; int8 weights and gradients are off by their bound."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raydz.config import load_engine
from raydz.dist import CommClock, Communicator
from raydz.errors import ConfigError, TrainingError
from tests.zero.models import Adapted, Plain, Poisoned
from tests.zero.test_accounting import BLOCKS, memory_run, sizes
from tests.zero.test_skip import bad_on_every_step, bad_on_last_rank, skip_once
from tests.zero.training import (
    Run,
    assert_equal_bits,
    batch_for,
    num_labels,
    numpy_weights,
    start,
    token_loss,
    train_step,
    train_with_engine,
)  # fmt: skip

NEAR = {"zero_hpz_partition_size": 2}
WEIGHTS, GRADIENTS = {"zero_quantized_weights": True}, {"zero_quantized_gradients": True}
BLOCK = 256


def with_zero(run: Run, **zero) -> Run:
    return run.with_(zero=(*run.zero, *zero.items()))


# -- hpZ -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    [
        Run(partial(Plain, 3), stage=3),
        Run(partial(Plain, 3), stage=3, accumulation=3, bf16=True),
        pytest.param(Run(partial(Plain, 2, order=(0, 1, 0)), stage=3), marks=pytest.mark.slow),
        pytest.param(Run(partial(Plain, 2, recompute="plain"), stage=3, boundary=True), marks=pytest.mark.slow),
        pytest.param(Run(Adapted, stage=3, accumulation=3), marks=pytest.mark.slow),
    ],
    ids=["plain", "bf16-accumulation", "used-twice", "recomputed", "frozen"],
)
def test_a_second_copy_changes_no_bit(ranks, run: Run) -> None:
    wanted = ranks(4).run(train_with_engine, run)[0]
    found = ranks(4).run(train_with_engine, with_zero(run, **NEAR))[0]
    assert (found.losses, found.norms) == (wanted.losses, wanted.norms)
    assert_equal_bits(found.weights, wanted.weights)


def bytes_by_group(rank: int, world_size: int, run: Run) -> dict[str, list[int]]:
    """Bytes that the third step sends to all ranks and to near ones, and those of the second copy."""
    engine = start(run)
    comms = {"gather": engine.comms.gather, "reduce": engine.comms.reduce, "near": engine.comms.near}
    for step in (1, 2, 3):
        before = {name: comm.bytes_sent for name, comm in comms.items() if comm is not None}
        train_step(engine, run, rank, world_size, step)
    found = {name: comm.bytes_sent - before[name] for name, comm in comms.items() if comm is not None}
    seconds = [group.gathering.second for group in engine.sharded.groups if group.gathering is not None]
    found["held"] = sum(second.values.untyped_storage().nbytes() for second in seconds if second is not None)
    engine.destroy()
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_only_the_first_gather_of_a_step_leaves_the_near_ranks(ranks, micro_batches: int) -> None:
    """Stage 3 sends 3 psi a micro-batch to all ranks: two gathers (fewer of what stays) and a reduction. Then 2 psi."""
    embed, block, head, root = sizes(4)
    psi, blocks = embed + BLOCKS * block + head + root, BLOCKS * block
    for found in ranks(4).run(bytes_by_group, with_zero(memory_run(3), **NEAR).with_(accumulation=micro_batches)):
        assert found["gather"] == 4 * psi * 3 // 4
        assert found["reduce"] == 4 * psi * 3 // 4 * micro_batches
        assert found["near"] == 4 * (micro_batches * (psi + blocks) - psi) // 2
        assert found["held"] == 4 * psi // 2
    for found in ranks(4).run(bytes_by_group, memory_run(3).with_(accumulation=micro_batches)):
        assert found["gather"] == 4 * micro_batches * (psi + blocks) * 3 // 4
        assert found["held"] == 0


def change_between_steps(rank: int, world_size: int, run: Run) -> tuple[dict, list[float]]:
    """All that changes weights beside an update, after the second copy was made; losses of every kind of pass."""
    engine, losses = start(run), []
    names = [name for name, _ in engine.module.named_parameters()]

    def evaluate() -> None:
        with torch.no_grad():
            losses.append(token_loss(engine, batch_for(9), rank, 9).item())

    train_step(engine, run, rank, world_size, 1)
    evaluate()
    with engine.gathered(modify=True):
        for parameter in engine.module.parameters():
            parameter.data.mul_(1.5)
    evaluate()
    engine.load_full_state_dict({names[1]: torch.full((10, 6), 0.25)}, strict=False)
    evaluate()
    train_step(engine, run, rank, world_size, 2)
    engine.set_trainable("layers.0.*", False)
    evaluate()
    train_step(engine, run, rank, world_size, 3)
    weights = numpy_weights(engine)
    engine.destroy()
    return weights, losses


def test_whatever_changes_weights_makes_the_second_copy_old(ranks) -> None:
    run = Run(partial(Plain, 3), stage=3)
    wanted = ranks(4).run(change_between_steps, run)
    found = ranks(4).run(change_between_steps, with_zero(run, **NEAR))
    assert [losses for _, losses in found] == [losses for _, losses in wanted]
    assert_equal_bits(found[0][0], wanted[0][0])


def test_near_ranks_that_are_all_ranks_keep_nothing(ranks) -> None:
    for found in ranks(2).run(bytes_by_group, with_zero(memory_run(3), **NEAR)):
        assert found["held"] == 0 and "near" not in found


def test_near_ranks_lie_within_a_shard_group(ranks) -> None:
    run = with_zero(Run(partial(Plain, 2), stage=3), **NEAR, mics_shard_size=2)
    for found in ranks(4).run(bytes_by_group, run):
        assert found["held"] == 0


@pytest.mark.parametrize("zero", [NEAR, WEIGHTS, GRADIENTS, {"zero_quantized_nontrainable_weights": True}], ids=str)
def test_what_is_about_released_weights_needs_stage_3(zero: dict) -> None:
    assert load_engine({"zero_optimization": {"stage": 3, **zero}})
    with pytest.raises(ConfigError, match="only ZeRO stage 3 has this") as caught:
        load_engine({"zero_optimization": {"stage": 2, **zero}})
    assert next(iter(zero)) in caught.value.where


def test_int8_gradients_and_a_whole_all_reduce_exclude_each_other() -> None:
    with pytest.raises(ConfigError, match="an all-reduce cannot send int8"):
        load_engine({"zero_optimization": {"stage": 3, "reduce_scatter": False, **GRADIENTS}})


# -- int8 weights --------------------------------------------------------------------------------------------------


def rounded(values: np.ndarray) -> np.ndarray:
    """Int8 blocks by numpy, one shard (n,) at a time: what a rank should compute with."""
    out = np.empty_like(values)
    for first in range(0, values.size, BLOCK):
        block = values[first : first + BLOCK]
        scale = np.float32(np.abs(block).max()) / np.float32(127)
        codes = np.rint(block / scale if scale else block).astype(np.int8)  # no -0
        out[first : first + BLOCK] = codes.astype(np.float32) * scale
    return out


class Wide(nn.Module):
    """Units whose shards are longer than a block and no multiple of it, over 2, 3 and 4 ranks."""

    def __init__(self, width: int = 37) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.embed, self.head = nn.Embedding(7, width), nn.Linear(width, 7, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(x)


def shown_and_exact(rank: int, world_size: int, run: Run, sections: dict) -> dict:
    """Compute weights as this rank sees them, and flat masters of all ranks by group, after a step."""
    engine = start(run, **sections)
    train_step(engine, run, rank, world_size, 1)
    exact = {name: tensor.numpy() for name, tensor in engine.full_state_dict().items()}
    with engine.gathered():
        shown = {name: p.detach().float().numpy().copy() for name, p in engine.module.named_parameters()}
    layouts = [(group.layout, group.keeps_parameters) for group in engine.sharded.groups]
    engine.destroy()
    return {"shown": shown, "exact": exact, "layouts": layouts}


def by_hand(exact: dict[str, np.ndarray], layouts: list) -> dict[str, np.ndarray]:
    """Round each rank's shard of each released group."""
    found = {}
    for layout, is_kept in layouts:
        flat = np.zeros(layout.padded_numel, np.float32)
        for segment in layout.segments:
            flat[segment.start : segment.stop] = exact[segment.name].reshape(-1)
        if not is_kept:
            flat = np.concatenate([rounded(shard) for shard in np.split(flat, layout.world_size)])
        found |= {s.name: flat[s.start : s.stop].reshape(s.shape) for s in layout.segments}
    return found


@pytest.mark.parametrize(("world", "near"), [(2, False), pytest.param(3, False, marks=pytest.mark.slow), (4, True)])
def test_every_rank_computes_with_the_same_rounded_weights_its_own_part_too(ranks, world: int, near: bool) -> None:
    zero = WEIGHTS | (NEAR if near else {}) | {"stage3_param_persistence_threshold": 40}
    everyone = ranks(world).run(shown_and_exact, Run(Wide, stage=3, zero=tuple(zero.items())), {})
    exact, layouts = everyone[0]["exact"], everyone[0]["layouts"]
    wanted = by_hand(exact, layouts)
    for found in everyone:
        assert_equal_bits(found["shown"], wanted)
    kept = [s.name for layout, is_kept in layouts if is_kept for s in layout.segments]
    assert kept == [f"layers.{i}.bias" for i in range(3)]  # small ones stay exact
    assert (wanted["layers.1.weight"] != exact["layers.1.weight"]).any()


def test_masters_stay_exact(ranks) -> None:
    run = Run(Wide, stage=3, steps=0, zero=tuple(WEIGHTS.items()))
    wanted = ranks(2).run(train_with_engine, run.with_(zero=()))[0]
    assert_equal_bits(ranks(2).run(train_with_engine, run)[0].weights, wanted.weights)


def test_fp32_modules_of_a_16_bit_model_are_not_rounded(ranks) -> None:
    sections = {"parallel": {"fp32_modules": ["layers.1"]}, "bf16": {"enabled": True}}
    zero = WEIGHTS | GRADIENTS | {"stage3_param_persistence_threshold": 0}
    found = ranks(2).run(shown_and_exact, Run(Wide, stage=3, zero=tuple(zero.items())), sections)[0]
    shown, exact = found["shown"], found["exact"]
    assert (shown["layers.1.weight"] == exact["layers.1.weight"]).all()
    in_bf16 = torch.from_numpy(exact["layers.2.weight"]).bfloat16().float().numpy()
    assert np.mean(shown["layers.2.weight"] != in_bf16) > 0.1


def half_frozen() -> nn.Module:
    model = Wide()
    model.layers[1].weight.requires_grad_(False)
    return model


def test_frozen_weights_alone_can_be_rounded(ranks) -> None:
    zero = {"zero_quantized_nontrainable_weights": True, "stage3_param_persistence_threshold": 0}
    found = ranks(2).run(shown_and_exact, Run(half_frozen, stage=3, zero=tuple(zero.items())), {})[0]
    differ = [name for name, values in found["shown"].items() if (values != found["exact"][name]).any()]
    assert differ == ["layers.1.weight"]


# -- int8 gradients ------------------------------------------------------------------------------------------------


def values_of(rank: int, numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(numel, generator=generator) * torch.logspace(-3, 3, numel)


def reduce_as_int8(rank: int, world_size: int, n: int, repeats: int) -> np.ndarray:
    import torch.distributed as dist

    comm = Communicator(dist.group.WORLD, ordered=False, clock=CommClock(torch.device("cpu")))
    out = torch.full((n,), math.nan)
    for repeat in range(repeats):
        comm.reduce_scatter_int8(values_of(rank, n * world_size), out, accumulate=repeat > 0).wait()
    return out.numpy()


@pytest.mark.parametrize("n", [1, 255, 257, 1000])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_a_sum_is_off_by_at_most_a_254th_of_each_ranks_block(ranks, world: int, n: int) -> None:
    shards = ranks(world).run(reduce_as_int8, n, 1)
    parts = [values_of(rank, n * world).double().numpy().reshape(world, n) for rank in range(world)]
    for owner, found in enumerate(shards):
        for first in range(0, n, BLOCK):
            block = slice(first, first + BLOCK)
            largest = sum(np.abs(values[owner, block]).max() for values in parts)
            exact = sum(values[owner, block] for values in parts)
            assert (np.abs(found[block] - exact) <= largest * (1 / 254 + 2**-20)).all()


def test_accumulating_adds_the_next_sum(ranks) -> None:
    once, thrice = ranks(2).run(reduce_as_int8, 300, 1), ranks(2).run(reduce_as_int8, 300, 3)
    for one, three in zip(once, thrice, strict=True):
        np.testing.assert_array_equal(three, (one + one) + one)


def reduced_gradients(rank: int, world_size: int, run: Run) -> dict:
    engine = start(run)
    batch = batch_for(1)
    for i in range(run.accumulation):
        rows = {key: value.chunk(world_size)[rank].chunk(run.accumulation)[i] for key, value in batch.items()}
        engine.backward(token_loss(engine, rows, rank, 1), denominator=num_labels(batch))
        report = engine.step() if i + 1 < run.accumulation else None
    sums = [grads.sums.numpy().copy() for grads in engine.sharded.gradients]
    persistent = [grads.group.keeps_parameters for grads in engine.sharded.gradients]
    report = engine.step()
    engine.destroy()
    return {"sums": sums, "persistent": persistent, "norm": report.grad_norm}


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("world", [2, 3])
def test_gradients_are_near_the_exact_ones_and_all_ranks_agree_on_the_norm(ranks, world: int, bf16: bool) -> None:
    zero = {"stage3_param_persistence_threshold": 40}
    run = Run(Wide, stage=3, bf16=bf16, zero=tuple(zero.items()), accumulation=2)
    exact = ranks(world).run(reduced_gradients, run)
    found = ranks(world).run(reduced_gradients, with_zero(run, **GRADIENTS))
    assert len({rank["norm"] for rank in found}) == 1
    for ours, theirs in zip(found, exact, strict=True):
        assert ours["norm"] == pytest.approx(theirs["norm"], rel=0.01) and ours["norm"] != theirs["norm"]
        for sums, wanted, persistent in zip(ours["sums"], theirs["sums"], ours["persistent"], strict=True):
            if persistent:
                assert sums.tobytes() == wanted.tobytes()
            else:  # each of 2 micro-batches of `world` ranks is off by a 254th of its own largest
                assert 0 < np.abs(sums - wanted).max() < 0.02 * np.abs(wanted).max() * world


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_gradient_that_is_not_finite_on_one_rank_skips_the_step_on_all(ranks, bf16: bool) -> None:
    run = with_zero(Run(Poisoned, bad_on_last_rank, stage=3, bf16=bf16), **GRADIENTS, **WEIGHTS)
    for found in ranks(2).run(skip_once, run):
        assert found["unchanged"] and found["skipped"].skipped and not math.isfinite(found["skipped"].grad_norm)
        assert not found["taken"].skipped and found["counted"] == (2, 1, 0)


def names_of_the_end(rank: int, world_size: int, run: Run) -> str:
    engine = start(run)
    with pytest.raises(TrainingError, match="not finite") as caught:
        for step in (1, 2):
            train_step(engine, run, rank, world_size, step)
    engine.destroy()
    return caught.value.where


def test_the_error_names_the_parameters_that_are_not_finite(ranks) -> None:
    run = Run(Poisoned, bad_on_every_step, stage=3, max_skipped=2)
    exact = ranks(2).run(names_of_the_end, run)
    assert exact[0] and ranks(2).run(names_of_the_end, with_zero(run, **GRADIENTS)) == exact


def verify(rank: int, world_size: int, run: Run) -> tuple[float, str]:
    engine, batch = start(run), batch_for(1)
    rows = {key: value.chunk(world_size)[rank] for key, value in batch.items()}
    check = partial(
        engine.verify_step, lambda model, _: token_loss(model, rows, rank, 1), denominator=num_labels(batch)
    )
    report = check(tolerance=0.05)
    with pytest.raises(ConfigError) as caught:
        check()
    engine.destroy()
    return report.differences[report.worst], str(caught.value)


def test_verifying_a_step_with_int8_gradients_wants_a_tolerance(ranks) -> None:
    run = Run(Wide, stage=3, zero=tuple((GRADIENTS | WEIGHTS).items()))
    for worst, refusal in ranks(2).run(verify, run):
        assert 0 < worst < 0.05
        assert "int8 gradients have no tolerance" in refusal


# -- bytes and losses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("bf16", "share"), [(False, 0.26), (True, 0.52)])
def test_int8_sends_about_a_quarter_of_fp32_and_half_of_bf16(ranks, bf16: bool, share: float) -> None:
    run = Run(partial(Wide, 64), stage=3, bf16=bf16, zero=(("stage3_param_persistence_threshold", 0),))
    plain = ranks(2).run(bytes_by_group, run)[0]
    packed = ranks(2).run(bytes_by_group, with_zero(run, **WEIGHTS, **GRADIENTS))[0]
    for kind in ("gather", "reduce"):
        assert share - 0.02 < packed[kind] / plain[kind] < share
    layer, table = 64 * 64 + 64, 7 * 64  # a shard of a layer: 2080 codes, 9 scales; of embedding or head: 224 and 1
    sent = 3 * (2080 + 48) + 2 * (224 + 16)
    assert (layer, table) == (2 * 2080, 2 * 224)
    assert packed["reduce"] == sent


def decoder_losses(rank: int, world_size: int, zero: dict, bf16: bool, device: str = "cpu") -> list[float]:
    """30 steps of a small decoder on sequences that count up by 1 to 3, from which it can learn."""
    import raydz
    from raydz.models import Decoder, DecoderShape

    shape = DecoderShape(
        vocab_size=48, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96,
    )  # fmt: skip
    with torch.device("meta"):
        model = Decoder(shape)
    config = {
        "train_batch_size": 24,
        "optimizer": {"type": "AdamW", "params": {"lr": 4e-3}},
        "bf16": {"enabled": bf16},
        "zero_optimization": {"stage": 3, **zero},
    }
    engine, losses = raydz.initialize(model, config, device=device), []
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        first, by = (torch.randint(low, high, (24, 1), generator=generator) for low, high in ((0, 48), (1, 4)))
        ids = ((first + by * torch.arange(17)) % 48).chunk(world_size)[rank].to(device)
        logits = engine(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        engine.backward(loss)
        engine.step()
        losses.append(sum(row[0] for row in engine.comms.reduce.all_gather_values([loss.item()])) / world_size)
    engine.destroy()
    return losses


@pytest.mark.parametrize("bf16", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_30_steps_of_a_decoder_stay_within_003_nats_of_the_exact_losses(ranks, world: int, bf16: bool) -> None:
    exact = ranks(world).run(decoder_losses, {}, bf16)[0]
    assert exact[-1] < exact[0] - 2  # it does learn
    both = WEIGHTS | GRADIENTS | (NEAR if world == 4 else {})
    found = ranks(world).run(decoder_losses, both, bf16)[0]
    assert found != exact
    np.testing.assert_allclose(found, exact, rtol=0, atol=0.03)

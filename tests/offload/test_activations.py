"""Inputs of recomputed blocks in host memory: the same gradients, no input on the device, buffers used again."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from raydz.errors import ConfigError, OffloadError
from raydz.models import Decoder, DecoderShape, compile_blocks, wrap_blocks
from raydz.models.checkpointing import offload_inputs
from raydz.offload.activations import ActivationOffload
from raydz.offload.memory import HostMemory
from tests.zero.models import WIDTH, Plain
from tests.zero.training import LENGTH, ROWS, Run, assert_equal_bits, numpy_weights, start, train_step

CPU = torch.device("cpu")
HIDDEN, LAYERS, WORDS = 16, 4, 50


def decoder(mode: bool | str = "full") -> Decoder:
    torch.manual_seed(0)
    return Decoder(DecoderShape(WORDS, HIDDEN, LAYERS, 2, 2, 32, activation_checkpointing=mode))


def offloaded(model: nn.Module, budget: int = 1 << 20) -> ActivationOffload:
    offload = ActivationOffload(HostMemory(budget), CPU)
    offload_inputs(model, offload)
    return offload


def ids_of(length: int = 8, seed: int = 0) -> Tensor:
    return torch.randint(0, WORDS, (2, length), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, length: int = 8, seed: int = 0) -> Tensor:
    ids = ids_of(length, seed)
    return model(ids, labels=ids)


def gradients(model: nn.Module) -> list[Tensor]:
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    return found


def assert_equal(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert len(found) == len(wanted) > 0
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_those_without_recomputation(mode: str) -> None:
    plain, model = decoder("none"), decoder(mode)
    offload = offloaded(model)
    for step in range(3):
        for which in (plain, model):
            loss_of(which, seed=step).backward()
        assert_equal(gradients(model), gradients(plain))
        assert offload.bytes_saved == (step + 1) * LAYERS * 2 * 8 * HIDDEN * 4


def test_inputs_have_no_memory_on_the_device_between_forward_and_backward() -> None:
    for keeps in (True, False):
        model, storages = decoder(), []
        if not keeps:
            offloaded(model)
        for block in model.model.layers:
            block.register_forward_pre_hook(
                lambda module, args, seen=storages: seen.append(StorageWeakRef(args[0].untyped_storage()))
            )
        loss = loss_of(model)
        gc.collect()
        # the last one is on its way: backward begins with it
        alive = [True] * LAYERS if keeps else [False] * (LAYERS - 1) + [True]
        assert [not seen.expired() for seen in storages] == alive
        loss.backward()
        gc.collect()
        assert all(seen.expired() for seen in storages)


def test_the_block_before_is_on_its_way_while_one_is_recomputed() -> None:
    model = decoder()
    offload = offloaded(model)
    fetched: list[int] = []
    begin = offload.fetch
    offload.fetch = lambda saved: (fetched.append(id(saved)), begin(saved))  # type: ignore[method-assign,assignment]
    seen = []
    for index, block in enumerate(model.model.layers):
        block.self_attn.register_forward_pre_hook(lambda *_, i=index: seen.append((i, len(set(fetched)))))
    loss_of(model).backward()
    forward, backward = seen[:LAYERS], seen[LAYERS:]
    assert forward == [(i, 0) for i in range(LAYERS)]
    # when block i is computed again, so many were asked for: itself, those above, and the one below
    assert backward == [(i, min(LAYERS - i + 1, LAYERS)) for i in reversed(range(LAYERS))]


def test_buffers_are_used_again_and_are_never_more_than_were_in_use() -> None:
    model = decoder()
    offload = offloaded(model)
    for length in (8, 8, 3, 16, 5, 16):
        loss_of(model, length).backward()
        gradients(model)
        assert offload.num_buffers == LAYERS
    two = [loss_of(model, 8, seed) for seed in (1, 2)]
    assert offload.num_buffers == 2 * LAYERS
    for loss in reversed(two):
        loss.backward()
    loss_of(model)  # a graph that is dropped
    assert offload.num_buffers == 2 * LAYERS
    offload.close()
    assert offload.num_buffers == 0


def test_two_graphs_at_a_time_and_a_graph_used_twice_keep_their_bits() -> None:
    plain, model = decoder("none"), decoder()
    offloaded(model)
    for which in (plain, model):
        losses = [loss_of(which, 8, seed) for seed in (1, 2)]
        losses[0].backward(retain_graph=True)
        losses[1].backward()
        losses[0].backward()
    assert_equal(gradients(model), gradients(plain))


class ByName(nn.Module):
    """Blocks that are handed their input by keyword, beside what is no tensor, and change it in place afterwards."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, *, x: Tensor, factor: float, nothing: None = None) -> Tensor:
            return torch.tanh(self.inner(x)) * factor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4)
        self.layers = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.layers:
            x = block(x=x, factor=0.5)
        return x.sum()


def test_keywords_are_offloaded_too() -> None:
    plain, model = ByName(), ByName()
    wrap_blocks(model, "full")
    offload = offloaded(model)
    for which in (plain, model):
        which(torch.ones(2, 4)).backward()
    assert offload.bytes_saved == 3 * 2 * 4 * 4
    assert_equal(gradients(model), gradients(plain))


def test_evaluation_and_tensors_without_gradient_stay_where_they_are() -> None:
    model = decoder()
    offload = offloaded(model)
    with torch.no_grad():
        loss_of(model)
    loss_of(model.eval())
    assert offload.bytes_saved == 0
    frozen = decoder()
    frozen.model.embed_tokens.requires_grad_(False)
    other = offloaded(frozen)
    loss_of(frozen).backward()
    assert other.bytes_saved == (LAYERS - 1) * 2 * 8 * HIDDEN * 4


def test_a_budget_that_is_spent_is_an_error_in_forward_by_name() -> None:
    model = decoder()
    offloaded(model, budget=4096)
    with pytest.raises(OffloadError, match=r"(?s)inputs of blocks.*parallel\.host_memory_budget"):
        loss_of(model)


def test_compiled_blocks_are_refused_in_any_order() -> None:
    model = decoder()
    compile_blocks(model, "eager")
    with pytest.raises(ConfigError, match="compiled"):
        offloaded(model)
    other = decoder()
    offloaded(other)
    with pytest.raises(ConfigError, match=r"activation_checkpointing\.cpu_checkpointing"):
        compile_blocks(other, "eager")


def test_nothing_keeps_an_offload_alive() -> None:
    model = decoder()
    offload = weakref.ref(offloaded(model))
    loss_of(model).backward()
    del model
    gc.collect()
    assert offload() is None


# -- in the engine -------------------------------------------------------------------------------------------------

ON = {"activation_checkpointing": {"cpu_checkpointing": True}}


def train(rank: int, world_size: int, run: Run, sections: dict):
    engine = start(run, **sections)
    for step in (1, 2, 3):
        train_step(engine, run, rank, world_size, step)
    saved = engine.activations.bytes_saved if engine.activations else 0
    weights = numpy_weights(engine)
    engine.destroy()
    return weights, saved


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_cpu_checkpointing_trains_to_the_same_bits(ranks, world: int, stage: int) -> None:
    run = Run(partial(Plain, 3), stage=stage, accumulation=2 if world == 1 else 3, bf16=world == 2)
    parallel = {"parallel": {"activation_checkpointing": "full"}}
    wanted = ranks(world).run(train, run, {})
    found = ranks(world).run(train, run, parallel | ON)
    assert_equal_bits(found[0][0], wanted[0][0])
    per_step = 3 * (ROWS // world) * LENGTH * WIDTH * (2 if run.bf16 else 4)
    assert [saved for _, saved in found] == [3 * per_step] * world
    assert [saved for _, saved in wanted] == [0] * world


def warnings_of(rank: int, world_size: int, run: Run, sections: dict) -> list[str]:
    import logging

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("raydz").addHandler(handler)
    try:
        start(run, **sections).destroy()
    finally:
        logging.getLogger("raydz").removeHandler(handler)
    return records


def test_without_recomputed_blocks_the_key_warns(ranks) -> None:
    run = Run(partial(Plain, 2))
    (said,) = ranks(1).run(warnings_of, run, ON)
    (line,) = [line for line in said if "cpu_checkpointing has no effect" in line]
    assert "parallel.activation_checkpointing" in line
    (said,) = ranks(1).run(warnings_of, run, ON | {"parallel": {"activation_checkpointing": "full"}})
    assert not any("cpu_checkpointing" in line for line in said)

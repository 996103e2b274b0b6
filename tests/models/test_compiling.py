"""Compiled blocks train alike, at every stage, and compile once for all blocks."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from raydz.errors import ConfigError
from raydz.models import Decoder, DecoderShape, causal_lm_loss, compile_blocks, wrap_blocks
from tests.zero.models import VOCABULARY
from tests.zero.training import Run, assert_close, numpy_weights, owned_bytes, start, train_step, train_with_engine

# Dynamo reads `.grad` of whatever a graph takes; torch drops its own warning, which the suite makes an error first.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")

SHAPE = DecoderShape(
    vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    intermediate_size=24,
)  # fmt: skip


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make(mode: str, backend: str | None, layers: int = 2) -> Decoder:
    model = Decoder(replace(SHAPE, activation_checkpointing=mode, num_hidden_layers=layers))
    if backend:
        compile_blocks(model, backend)
    return model


def built(mode: str, backend: str | None, layers: int = 2) -> Decoder:
    torch.manual_seed(0)
    return make(mode, backend, layers)


def gradients(model: nn.Module, ids: Tensor, documents: Tensor | None = None) -> list[Tensor]:
    model.zero_grad()
    model(ids, document_ids=documents).square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["none", "full", "selective"])
def test_gradients_of_compiled_blocks_are_those_of_eager_ones(mode: str) -> None:
    """With documents, without, and with rows of another length."""
    plain, compiled = built("none", None), built(mode, "aot_eager")
    for length in (6, 9):
        ids = torch.randint(0, VOCABULARY, (2, length))
        for documents in (None, (torch.arange(length) // 4).expand(2, length)):
            found, wanted = gradients(compiled, ids, documents), gradients(plain, ids, documents)
            for left, right in zip(found, wanted, strict=True):
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_one_graph_serves_all_blocks() -> None:
    """More blocks than dynamo compiles one function for."""
    torch._dynamo.utils.counters.clear()
    assert torch._dynamo.config.recompile_limit < 12
    gradients(built("full", "aot_eager", layers=12), torch.randint(0, VOCABULARY, (2, 6)))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_order_of_wrapping_and_compiling_does_not_matter() -> None:
    model, ids = built("none", "aot_eager"), torch.randint(0, VOCABULARY, (2, 6))
    wrap_blocks(model, "full")
    block = model.model.layers[0].forward
    assert (block.mode, block.backend) == ("full", "aot_eager")
    for left, right in zip(gradients(model, ids), gradients(built("none", None), ids), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_evaluation_is_not_compiled() -> None:
    model, ids = built("none", "aot_eager"), torch.randint(0, VOCABULARY, (1, 4))
    torch._dynamo.utils.counters.clear()
    with torch.no_grad():
        model(ids)
    model.eval()(ids)
    assert not torch._dynamo.utils.counters["stats"]


def test_a_copy_compiles_its_own_weights() -> None:
    model, ids = built("none", "aot_eager"), torch.randint(0, VOCABULARY, (2, 5))
    wanted, twin = gradients(model, ids), copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for left, right in zip(gradients(twin, ids), wanted, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-7)


def test_unknown_backend_and_model_without_blocks_are_typed_errors() -> None:
    with pytest.raises(ConfigError, match="no such backend"):
        compile_blocks(built("none", None), "inductro")
    with pytest.raises(ConfigError, match="no blocks"):
        compile_blocks(nn.Linear(2, 2), "aot_eager")


# -- under the engine --------------------------------------------------------------------------------------------------


def loss(model, micro: dict, rank: int, step: int) -> Tensor:
    names = {"position_ids": None, "document_ids": None}
    return causal_lm_loss(model, {"input_ids": micro["ids"], "labels": micro["labels"], **names})


def graphs_and_weights(rank: int, world_size: int, run: Run) -> tuple[int, list[bytes], dict]:
    """Train; how many graphs were compiled, and every bit of this rank's state."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    engine = start(run)
    for step in (1, 2, 3):
        train_step(engine, run, rank, world_size, step)
    state, weights = owned_bytes(engine), numpy_weights(engine)
    engine.destroy()
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], state, weights


@pytest.mark.parametrize(
    ("stage", "mode"),
    [
        (3, "none"),
        (2, "selective"),
        *(pytest.param(s, m, marks=pytest.mark.slow) for s, m in ((0, "none"), (1, "none"), (2, "none"), (3, "full"))),
    ],
)
def test_compiled_blocks_train_like_eager_ones_at_every_stage(ranks, stage: int, mode: str) -> None:
    run = Run(partial(make, "none", None), loss, stage=stage)
    wanted = ranks(2).run(train_with_engine, run)[0]
    compiled = run.with_(model=partial(make, mode, "aot_eager"))
    assert_close(ranks(2).run(train_with_engine, compiled)[0], wanted)


def test_gathers_stay_outside_of_the_graph(ranks) -> None:
    """All blocks of all steps share one graph at stage 3, where every weight is a placeholder between its uses."""
    run = Run(partial(make, "none", "aot_eager"), loss, stage=3)
    for num_graphs, _, _ in ranks(2).run(graphs_and_weights, run):
        assert num_graphs == 1


@pytest.mark.slow
def test_inductor_trains_like_eager(ranks) -> None:
    run = Run(partial(make, "none", None), loss, stage=3)
    wanted = ranks(2).run(train_with_engine, run)[0]
    found = ranks(2).run(train_with_engine, run.with_(model=partial(make, "none", "inductor")), limit_s=400)[0]
    assert_close(found, wanted)

"""Recomputation keeps less, changes no bit, and works for any model at any stage."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from raydz.errors import ConfigError
from raydz.models import Decoder, DecoderShape, compile_blocks, wrap_blocks
from raydz.models.blocks import BlockForward
from tests.models.live_bytes import LiveBytes
from tests.zero.training import Run, assert_equal_bits, numpy_weights, start, train_step

MODES = ("none", "selective", "full")
SHAPE = DecoderShape(
    vocab_size=31, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
    intermediate_size=48,
)  # fmt: skip


class Layer(nn.Module):
    """A pre-norm block of torch's own modules, with dropout and a keyword argument."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.attend = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.down, self.drop = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Dropout(0.2)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> Tensor:
        y = self.norm(x)
        x = x + self.attend(y, y, y, need_weights=False)[0] * scale
        return x + self.drop(self.down(nn.functional.gelu(self.up(x))))


class Foreign(nn.Module):
    """People's own model: nothing of it knows about recomputation."""

    def __init__(self, width: int = 16, vocabulary: int = 11) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Layer(width) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, scale=0.5)
        return self.head(x)


def decoder(mode: bool | str, dtype: torch.dtype = torch.float32) -> Decoder:
    torch.manual_seed(0)
    return Decoder(replace(SHAPE, activation_checkpointing=mode)).to(dtype)


def foreign(mode: str) -> Foreign:
    torch.manual_seed(0)
    model = Foreign()
    wrap_blocks(model, mode)
    return model


def gradients(model: nn.Module, ids: Tensor) -> list[Tensor]:
    torch.manual_seed(5)  # dropout
    model(ids).float().square().mean().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("build", [decoder, foreign, lambda mode: decoder(mode, torch.bfloat16)])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(build, mode: str) -> None:
    ids = torch.randint(0, 11, (2, 12))
    wanted, found = gradients(build("none"), ids), gradients(build(mode), ids)
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))


@pytest.mark.parametrize("build", [decoder, foreign])
def test_full_keeps_less_than_selective_and_selective_less_than_none(build) -> None:
    ids, kept = torch.randint(0, 11, (4, 64)), {}
    for mode in MODES:
        model = build(mode)
        with LiveBytes(ids, *model.parameters()) as live:
            logits = model(ids)
        kept[mode] = live.now()
        del logits
    assert kept["full"] < 0.5 * kept["selective"] and kept["selective"] < 0.75 * kept["none"], kept


def test_full_keeps_a_blocks_inputs_alone() -> None:
    """By torch's own list of what autograd saves: of a wrapped block nothing but x, cos and sin."""
    saved: dict[str, int] = {}
    for mode in MODES[::2]:
        model, total = decoder(mode), 0

        def count(tensor: Tensor) -> Tensor:
            nonlocal total
            total += tensor.numel() * tensor.element_size()
            return tensor

        x, (cos, sin) = torch.randn(2, 16, 32, requires_grad=True), model._rotary(torch.arange(16)[None], torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(count, lambda t: t):
            model.model.layers[0](x, cos, sin, None)
        saved[mode] = total
    inputs = 4 * (2 * 16 * 32 + 2 * 16 * 8)
    assert saved["full"] <= inputs and saved["none"] > 10 * inputs


def test_evaluation_and_no_grad_run_the_blocks_own_forward(monkeypatch) -> None:
    model, ids = decoder("full"), torch.randint(0, 11, (1, 4))
    for block in model.model.layers:
        monkeypatch.setattr(BlockForward.of(block), "_training", None)  # would fail if called
    model.eval()(ids)
    model.train()
    with torch.no_grad():
        model(ids)
    with pytest.raises(TypeError):
        model(ids)


def test_true_is_full_and_false_is_none() -> None:
    for value, mode in ((True, "full"), (False, "none")):
        block = decoder(value).model.layers[0]
        assert getattr(block.__dict__.get("forward"), "mode", "none") == mode


def test_names_and_state_stay_and_a_copy_recomputes_with_its_own_weights() -> None:
    model = foreign("full")
    assert list(model.state_dict()) == list(Foreign().state_dict())
    twin, ids = copy.deepcopy(model), torch.randint(0, 11, (2, 5))
    wanted = gradients(model, ids)
    for p in model.parameters():
        p.grad = None
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(float("nan"))
    found = gradients(twin, ids)
    assert twin.blocks[0].forward.mode == "full" and twin.blocks[0].forward.block is twin.blocks[0]
    assert all(torch.equal(left, right) for left, right in zip(found, wanted, strict=True))
    assert all(p.grad is None for p in model.parameters())


def compiled(model: nn.Module) -> nn.Module:
    compile_blocks(model, "eager")
    return model


class Nested(Foreign):
    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Linear(16, 16)


@pytest.mark.parametrize(
    ("model", "mode", "patterns", "said"),
    [
        (Foreign, "all", None, "unknown activation checkpointing"),
        (lambda: nn.Sequential(nn.Linear(2, 2)), "full", None, "no blocks"),
        (Foreign, "selective", ["blocks.0", "blocks.0.up"], "recomputed selectively"),
        (lambda: decoder("selective"), "none", ["model.layers.*.mlp"], "recomputed selectively"),
        (lambda: compiled(Foreign()), "none", ["blocks.0.up"], "compiled"),
        (lambda: foreign("full"), "selective", None, "two kinds"),
    ],
)
def test_what_cannot_be_recomputed_is_a_typed_error(model, mode: str, patterns, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        wrap_blocks(model(), mode, patterns)


def test_blocks_are_outermost_units_made_of_modules() -> None:
    assert wrap_blocks(Nested(), "full") == ["blocks.0", "blocks.1"]
    assert wrap_blocks(Nested(), "full", ["blocks.1", "blocks.1.up", "alone"]) == ["blocks.1"]
    model = foreign("full")
    assert wrap_blocks(model, "full") == ["blocks.0", "blocks.1"] and wrap_blocks(model, "none") == []
    assert wrap_blocks(decoder("full"), "none", ["model.layers.*.mlp"]) == []


# -- under the engine --------------------------------------------------------------------------------------------------


def recomputed_units(engine) -> list[str]:
    modules = dict(engine.module.named_modules())
    return [name for name, module in modules.items() if isinstance(module.__dict__.get("forward"), BlockForward)]


def train_foreign(rank: int, world_size: int, stage: int, mode: str) -> tuple[dict, list[str]]:
    """Three steps through the engine's own option; rank 0's weights, and which modules recompute."""
    run = Run(Foreign, stage=stage)
    parallel = run.config()["parallel"] | {"activation_checkpointing": mode}
    engine = start(run, parallel=parallel)
    for step in (1, 2, 3):
        torch.manual_seed(1000 * step + rank)  # dropout
        train_step(engine, run, rank, world_size, step)
    weights, names = numpy_weights(engine), recomputed_units(engine)
    engine.destroy()
    return weights, names


@pytest.mark.parametrize("stage", range(4))
def test_the_engines_option_recomputes_any_model_without_changing_a_bit(ranks, stage: int) -> None:
    wanted, names = ranks(2).run(train_foreign, stage, "none")[0]
    assert names == []
    for mode in ("full", "selective"):
        found, names = ranks(2).run(train_foreign, stage, mode)[0]
        assert names == ["blocks.0", "blocks.1"]
        assert_equal_bits(found, wanted)

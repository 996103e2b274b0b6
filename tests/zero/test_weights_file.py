"""`save_16bit_model`: one safetensors file, read by the safetensors package, with what forward computes with."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model
from torch import Tensor, nn

from raydz.errors import ConfigError, StorageError
from tests.zero.models import Adapted, OddSizes, Plain
from tests.zero.training import Run, batch_for, build, start, train_step

GATHERS = (("stage3_gather_16bit_weights_on_model_save", True),)


class Buffered(Plain):
    """With a buffer that is saved and one that is not."""

    def __init__(self) -> None:
        super().__init__(tied=True)
        self.register_buffer("scale", torch.tensor(0.5))
        self.register_buffer("cache", torch.ones(3), persistent=False)

    def forward(self, ids: Tensor, **given) -> Tensor:
        return super().forward(ids, **given) * self.scale


def save_and_compute(rank: int, world_size: int, run: Run, folder: str, exclude_frozen: bool = False) -> Tensor:
    """Logits of a trained model, after it was saved."""
    engine = start(run)
    train_step(engine, run, rank, world_size, 1)
    engine.save_16bit_model(folder, exclude_frozen=exclude_frozen)
    with torch.no_grad():
        logits = engine(batch_for(2)["ids"])
    train_step(engine, run, rank, world_size, 2)  # and training goes on
    engine.destroy()
    return logits


@pytest.mark.parametrize(("stage", "bf16"), [(0, False), (2, True), (3, True), (3, False)])
@pytest.mark.parametrize("world", [2, 3])
def test_a_plain_module_with_the_saved_weights_computes_the_same(
    ranks, tmp_path: Path, world: int, stage: int, bf16: bool
) -> None:
    run = Run(Buffered, stage=stage, bf16=bf16, zero=GATHERS)
    logits = ranks(world).run(save_and_compute, run, str(tmp_path))[0]
    dtype = torch.bfloat16 if bf16 else torch.float32
    module: nn.Module = build(run).to(dtype)
    load_model(module, tmp_path / "model.safetensors")
    with safe_open(tmp_path / "model.safetensors", "pt") as opened:
        assert opened.metadata() == {"head.weight": "embed.weight", "format": "pt"}
    state = load_file(tmp_path / "model.safetensors")
    assert {t.dtype for name, t in state.items() if name != "scale"} == {dtype}
    assert "embed.weight" in state and not {"cache", "head.weight"} & set(state)
    module.scale = module.scale.float()  # the engine leaves buffers as they are
    with torch.no_grad():
        assert torch.equal(module(batch_for(2)["ids"]), logits)


def save_fresh(rank: int, world_size: int, run: Run, folder: str, exclude_frozen: bool) -> list[str]:
    engine = start(run)
    engine.save_16bit_model(folder, exclude_frozen=exclude_frozen)
    engine.destroy()
    return sorted(name for name, p in engine.module.named_parameters() if p.requires_grad or not exclude_frozen)


@pytest.mark.parametrize("exclude_frozen", [False, True])
def test_frozen_parameters_can_be_left_out(ranks, tmp_path: Path, exclude_frozen: bool) -> None:
    run = Run(Adapted, stage=3, zero=GATHERS)
    names = ranks(2).run(save_fresh, run, str(tmp_path), exclude_frozen)[0]
    state = load_file(tmp_path / "model.safetensors")
    assert sorted(state) == names
    assert all(torch.equal(state[name], p) for name, p in build(run).named_parameters() if name in state)


def test_parameters_of_no_elements_and_of_no_dimensions_are_saved(ranks, tmp_path: Path) -> None:
    run = Run(OddSizes, stage=3, zero=GATHERS)
    ranks(2).run(save_fresh, run, str(tmp_path), False)
    state = load_file(tmp_path / "model.safetensors")
    assert {name: p.shape for name, p in build(run).named_parameters()} == {n: t.shape for n, t in state.items()}


def refused(rank: int, world_size: int, run: Run, folder: str, filename: str, error: type) -> tuple[str, bool]:
    """The error on this rank, and whether the engine still trains."""
    engine = start(run)
    with pytest.raises(error) as caught:
        engine.save_16bit_model(folder, filename)
    report = train_step(engine, run, rank, world_size, 1)[1]
    engine.destroy()
    return str(caught.value), report is not None


def test_at_stage_3_it_must_be_asked_for(ranks, tmp_path: Path) -> None:
    case = partial(ranks(2).run, refused, Run(Plain, stage=3), str(tmp_path), "model.safetensors", ConfigError)
    for text, trains in case():
        assert "stage3_gather_16bit_weights_on_model_save" in text and trains
    assert list(tmp_path.iterdir()) == []


def test_a_pickles_name_is_refused(ranks, tmp_path: Path) -> None:
    for text, _ in ranks(2).run(refused, Run(Plain, stage=1), str(tmp_path), "pytorch_model.bin", ConfigError):
        assert "safetensors" in text


def test_a_folder_that_cannot_be_written_is_an_error_on_every_rank_and_training_goes_on(ranks, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    run = Run(Plain, stage=3, zero=GATHERS)
    for text, trains in ranks(2).run(refused, run, str(taken / "below"), "model.safetensors", StorageError):
        assert "taken" in text and trains

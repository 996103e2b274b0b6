"""Models of transformers and peft as they come: the training of one process of torch, generation, export."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.zero.families import (
    FAMILIES,
    Case,
    assert_equal_training,
    build,
    ids_of,
    start,
    train_with_engine,
    train_with_torch,
)  # fmt: skip
from tests.zero.training import assert_equal_bits

SLOW = pytest.mark.slow
pytestmark = pytest.mark.filterwarnings("ignore:.*will be removed in v6:FutureWarning")  # old names
FEW = [name if name in ("qwen2", "mixtral") else pytest.param(name, marks=SLOW) for name in FAMILIES]


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize("family", FEW)
def test_families_train_and_generate_as_in_torch(ranks, family: str, stage: int) -> None:
    case = Case(family, stage, generates=stage == 3)
    assert_equal_training(ranks(2).run(train_with_engine, case)[0], train_with_torch(case, 2))


@pytest.mark.parametrize("stage", [pytest.param(0, marks=SLOW), pytest.param(2, marks=SLOW), 3])
@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=SLOW)])
def test_adapters_in_fp32_train_over_a_frozen_bf16_base(ranks, stage: int, recompute: bool) -> None:
    case = Case("llama", stage, lora=True, recompute=recompute)
    found, wanted = ranks(2).run(train_with_engine, case)[0], train_with_torch(case, 2)
    assert_equal_training(found, wanted)
    before = {name: p.detach().float().numpy() for name, p in build(case).named_parameters()}
    changed = {name for name in before if not np.array_equal(found.weights[name], before[name])}
    assert changed == {name for name in before if "lora_" in name}


@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=SLOW), pytest.param("mixtral", marks=SLOW)])
def test_recomputation_changes_no_bit(ranks, family: str) -> None:
    plain, again = (ranks(2).run(train_with_engine, Case(family, 3, recompute=r))[0] for r in (False, True))
    assert_equal_bits(again.weights, plain.weights)


def test_generation_between_steps_changes_no_bit(ranks) -> None:
    plain, with_it = (ranks(2).run(train_with_engine, Case("qwen2", 3, generates=g))[0] for g in (False, True))
    assert_equal_bits(with_it.weights, plain.weights)


@pytest.mark.parametrize(
    "family", ["llama-tied", pytest.param("gpt2", marks=SLOW), pytest.param("mixtral", marks=SLOW)]
)
def test_bf16_has_the_same_bits_at_every_stage(ranks, family: str) -> None:
    first, *others = [ranks(2).run(train_with_engine, Case(family, stage, bf16=True))[0] for stage in (0, 2, 3)]
    for other in others:
        assert_equal_bits(other.weights, first.weights)


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3-moe", marks=SLOW)])
def test_muon_on_experts_has_the_same_bits_at_every_stage(ranks, family: str) -> None:
    first, other = (ranks(2).run(train_with_engine, Case(family, stage, optimizer="Muon"))[0] for stage in (0, 3))
    assert_equal_bits(other.weights, first.weights)


def save_adapter(rank: int, world_size: int, case: Case, folder: str) -> dict[str, np.ndarray]:
    engine = start(case)
    ids = ids_of(0).chunk(world_size)[rank]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    with engine.gathered():
        if rank == 0:
            engine.module.save_pretrained(folder)
    weights = engine.full_state_dict()
    engine.destroy()
    return {name: tensor.numpy() for name, tensor in weights.items() if "lora_" in name}


def test_an_adapter_is_saved_alone(ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    weights = ranks(2).run(save_adapter, Case("llama", 3, lora=True), str(tmp_path))[0]
    stored = load_file(tmp_path / "adapter_model.safetensors")
    assert len(stored) == len(weights) == 8
    for name, tensor in stored.items():
        np.testing.assert_array_equal(tensor.numpy(), weights[name.replace(".weight", ".default.weight")])


def save(rank: int, world_size: int, case: Case, folder: str) -> dict[str, np.ndarray]:
    """Train one step and save as people do, from within `gathered`; what was refused outside of it."""
    from raydz.errors import LayoutError

    engine = start(case)
    ids = ids_of(0).chunk(world_size)[rank]
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    with pytest.raises(LayoutError, match=r"engine\.gathered"):
        engine.module.save_pretrained(folder + "-refused")
    with engine.gathered(modify=True):  # the masters
        if rank == 0:
            engine.module.save_pretrained(folder)
    before = engine.full_state_dict()
    engine.backward(engine(input_ids=ids, labels=ids).loss)
    engine.step()
    engine.destroy()
    return {name: tensor.numpy() for name, tensor in before.items()}


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 3])
@pytest.mark.parametrize("family", ["qwen2", pytest.param("gpt2", marks=SLOW), pytest.param("qwen3-moe", marks=SLOW)])
def test_save_pretrained_after_a_gather_gives_what_from_pretrained_loads(ranks, tmp_path: Path, family, stage) -> None:
    from safetensors import safe_open

    case, folder = Case(family, stage, bf16=True), str(tmp_path / "saved")
    weights = ranks(2).run(save, case, folder)[0]
    loaded = type(build(case)).from_pretrained(folder, dtype=torch.float32)
    for name, parameter in loaded.named_parameters():
        np.testing.assert_array_equal(parameter.detach().numpy(), weights[name], err_msg=name)
    with safe_open(folder + "/model.safetensors", "pt") as file:
        stored = set(file.keys())
    if loaded.config.tie_word_embeddings:
        assert "lm_head.weight" not in stored
        assert loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight
    assert not (tmp_path / "saved-refused" / "model.safetensors").exists()

"""Checkpoints that DeepSpeed 0.19.8 wrote on two ranks (`record.py`): what they convert to, how training goes on."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch

from raydz.checkpoint import open_checkpoint
from raydz.errors import CheckpointError
from raydz.hf import open_source
from raydz.storage import open_store
from tests.hf import foreign_model as foreign
from tests.hf.conversions import RECORDED, convert, expected, go_on, merged, same_bits, tensors_of

GROUP_OF_VECTORS = ["gain", "up.bias", "norm.weight", "norm.bias", "down.bias"]
CASES = sorted(path.name for path in RECORDED.iterdir())


@pytest.mark.parametrize("case", CASES)
def test_weights_moments_step_and_client_state_are_those_of_the_live_engine(case: str, tmp_path: Path):
    tensors, _ = expected(case)
    source = convert(RECORDED / case, tmp_path)
    found = tensors_of(source)
    assert set(found) == set(tensors) and same_bits(found, tensors) == []
    assert source.aliases == {"head.weight": "embed.weight"}
    assert (source.step, source.counters["micro_steps"], source.client) == (3, 3, foreign.CLIENT_STATE)
    assert open_checkpoint(open_store(str(tmp_path)))[1].aliases == source.aliases
    stored = merged(str(tmp_path))  # read by the safetensors library, not by raydz
    assert same_bits(stored, {name: tensor.reshape(-1) for name, tensor in tensors.items()}) == []


def test_the_module_that_deepspeed_saved_beside_the_masters_says_the_same():
    """Of `stage2`, whose recorded values are those of another case."""
    from tests.hf.stand_ins import allowed

    with allowed():
        module = torch.load(RECORDED / "stage2/global_step3/mp_rank_00_model_states.pt", weights_only=True)["module"]
    tensors, losses = expected("stage2")
    wanted = {name: module[name.partition("/")[2]] for name in tensors if name.startswith("weight/")}
    assert same_bits(tensors_of(open_source(str(RECORDED / "stage2"))), wanted) == []
    assert losses == json.loads((RECORDED / "stage2/losses.json").read_text())


def check_that_training_goes_on(case: str, stage: int, world_size: int, tmp_path: Path, ranks) -> None:
    tensors, losses = expected(case)
    convert(RECORDED / case, tmp_path / "c")
    is_bf16 = case.startswith("bf16")
    found = ranks(world_size).run(go_on, str(tmp_path / "c"), stage, is_bf16, {})
    again = merged(f"{tmp_path}/c-again-{stage}-{world_size}")
    flat = {name: tensor.reshape(-1) for name, tensor in tensors.items()}
    if is_bf16:  # a frozen parameter and a buffer of DeepSpeed's module are bf16 there as here
        again = {name: tensor.to(flat[name].dtype) for name, tensor in again.items()}
    assert same_bits(again, flat) == []
    for result in found:
        assert result["client"] == foreign.CLIENT_STATE and result["steps"] == foreign.STEPS
        # fp32: sums in another order; bf16: a loss of 3.4 from logits with 8 bits, and gradients summed in bf16 there
        assert result["losses"] == pytest.approx(losses[foreign.STEPS :], rel=3e-4 if is_bf16 else 1e-6)


def test_training_goes_on_at_another_stage_and_world_size(tmp_path: Path, ranks):
    check_that_training_goes_on("stage2", 3, 1, tmp_path, ranks)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world_size"), [(0, 1), (1, 4), (2, 2), (3, 2)])
@pytest.mark.parametrize("case", CASES)
def test_training_goes_on_everywhere(case: str, stage: int, world_size: int, tmp_path: Path, ranks):
    check_that_training_goes_on(case, stage, world_size, tmp_path, ranks)


def test_weights_alone_can_be_had(tmp_path: Path):
    source = convert(RECORDED / "stage3", tmp_path, weights_only=True)
    assert {item.kind for item in source.tensors} == {"weight", "buffer"}


# -- what is wrong with a folder ---------------------------------------------------------------------------------------


def copied(case: str, tmp_path: Path) -> Path:
    return Path(shutil.copytree(RECORDED / case, tmp_path / "copy"))


def change(path: Path, edit) -> None:
    """Let `edit` change what a file holds."""
    from tests.hf.stand_ins import allowed

    with allowed():
        state = torch.load(path, weights_only=True)
        edit(state)
        torch.save(state, path)


def test_a_missing_rank_is_named(tmp_path: Path):
    folder = copied("stage3", tmp_path)
    (folder / "global_step3/zero_pp_rank_0_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"files of ranks are missing[\s\S]*\[0\]"):
        open_source(str(folder))
    folder = copied("stage2", tmp_path / "last")
    (folder / "global_step3/zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"files of ranks are missing[\s\S]*1 ranks[\s\S]*2 ranks"):
        open_source(str(folder))


def test_a_rank_of_another_save_is_found_by_its_sizes(tmp_path: Path):
    folder = copied("stage1", tmp_path)
    states = folder / "global_step3"

    def shorten(state) -> None:
        flat = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flat[0] = flat[0][:-20].clone()

    change(states / "zero_pp_rank_1_mp_rank_00_optim_states.pt", shorten)
    with pytest.raises(CheckpointError, match=r"do not add up[\s\S]*down.weight"):
        open_source(str(folder))


def test_masters_of_another_save_of_the_same_sizes_are_found(tmp_path: Path):
    """As ds_to_universal gives them, too, where it meets round_robin_gradients."""
    folder = copied("stage2", tmp_path)
    states = folder / "global_step3"

    def age(state) -> None:
        flats = state["optimizer_state_dict"]["single_partition_of_fp32_groups"]
        flats[0] = flats[0].detach() + 0.01

    change(states / "zero_pp_rank_1_mp_rank_00_optim_states.pt", age)
    with pytest.raises(CheckpointError, match=r"not that of the module beside it[\s\S]*0.01"):
        tensors_of(open_source(str(folder)))


def test_elements_between_aligned_parameters_are_left_out(tmp_path: Path):
    """DeepSpeed pads each parameter where a device wants it; here three elements behind each are put in by hand."""
    from tests.hf.stand_ins import allowed

    folder, (tensors, _) = copied("stage1", tmp_path), expected("stage1")
    paths = sorted((folder / "global_step3").glob("*_optim_states.pt"))
    with allowed():
        states = [torch.load(path, weights_only=True) for path in paths]
        for group, names in enumerate([["embed.weight", "up.weight", "down.weight"], GROUP_OF_VECTORS]):
            for kind in ("weight", "exp_avg", "exp_avg_sq"):
                padded = [torch.nn.functional.pad(tensors[f"{kind}/{name}"].flatten(), (0, 3)) for name in names]
                for state, half in zip(states, torch.cat(padded).chunk(2), strict=True):
                    own = state["optimizer_state_dict"]
                    if kind == "weight":
                        own["single_partition_of_fp32_groups"][group] = half.clone()
                    else:
                        own["base_optimizer_state"]["state"][group][kind] = half.clone()
                    own["param_alignment_paddings"][group] = [3] * len(names)
        for path, state in zip(paths, states, strict=True):
            torch.save(state, path)
    assert same_bits(tensors_of(open_source(str(folder))), tensors) == []


@pytest.mark.parametrize("name", ["zero_pp_rank_0_mp_rank_01_optim_states.pt", "layer_00-model_states.pt"])
def test_more_than_data_parallelism_is_refused(name: str, tmp_path: Path):
    folder = copied("stage1", tmp_path)
    (folder / "global_step3" / name).touch()
    with pytest.raises(CheckpointError, match=r"more than data parallelism[\s\S]*ds_to_universal"):
        open_source(str(folder))


def test_a_damaged_file_is_a_typed_error(tmp_path: Path):
    folder = copied("stage1", tmp_path)
    path = folder / "global_step3/mp_rank_00_model_states.pt"
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(CheckpointError, match=r"not a file that torch wrote, or damaged[\s\S]*mp_rank_00"):
        open_source(str(folder))


class Planted:
    """Its pickle makes a folder when it is loaded by Python's own rules."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("case", ["stage1", "stage3", "universal"])
def test_a_planted_pickle_does_not_run(case: str, tmp_path: Path):
    folder, trace = copied(case, tmp_path), tmp_path / "ran"
    path = min(folder.rglob("fp32.pt" if case == "universal" else "*rank_0*_states.pt"))
    torch.save({"param": Planted(str(trace))}, path)
    with pytest.raises(CheckpointError, match=r"not known to be harmless[\s\S]*mkdir"):
        tensors_of(open_source(str(folder)))
    assert not trace.exists()
    torch.load(path, weights_only=False)
    assert trace.exists()  # so it would have run


def test_client_state_that_is_no_json_is_left_out_and_said(tmp_path: Path):
    folder = copied("stage1", tmp_path)
    change(folder / "global_step3/mp_rank_00_model_states.pt", lambda state: state.update(table=torch.ones(2)))
    source = open_source(str(folder))
    assert source.client == foreign.CLIENT_STATE
    assert any("'table' is left out" in note for note in source.notes)


def test_skipped_steps_do_not_count_and_the_optimizers_step_decides(tmp_path: Path):
    folder = copied("stage2", tmp_path)
    change(
        folder / "global_step3/mp_rank_00_model_states.pt", lambda state: state.update(global_steps=5, skipped_steps=2)
    )
    source = open_source(str(folder))
    assert source.step == 3 and source.counters["skipped_steps"] == 2 and source.notes == []


def test_the_loss_scale_goes_on(tmp_path: Path):
    """A DynamicLossScaler as fp16 training pickles it: fp16 itself needs a GPU under DeepSpeed."""
    from tests.hf.stand_ins import DynamicLossScaler

    folder = copied("stage2", tmp_path)
    scaler = DynamicLossScaler(cur_scale=2.0**12, cur_iter=9, last_overflow_iter=4, cur_hysteresis=1, dynamic=True)
    for path in (folder / "global_step3").glob("*_optim_states.pt"):
        change(path, lambda state: state["optimizer_state_dict"].update(loss_scaler=scaler))
    assert open_source(str(folder)).counters["loss_scale"] == {
        "scale": 4096.0, "overflows_left": 1, "good_steps": 4, "stuck_steps": 0,
    }  # fmt: skip

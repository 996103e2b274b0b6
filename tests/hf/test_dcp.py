"""DCP checkpoints that FSDP2 writes on two gloo ranks, converted and trained on; and what must not run."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from raydz.errors import CheckpointError
from raydz.hf import open_source
from raydz.hf.dcp_metadata import read_metadata
from tests.hf import foreign_model as foreign
from tests.hf.conversions import convert, go_on, merged, same_bits, tensors_of

LAYOUTS = ("nested", "titan", "flat", "by_number")


def save_with_fsdp2(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """Train under FSDP2, save in four layouts, and go on; the live state and the next losses."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    model = foreign.build()
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, **{**foreign.ADAM, "betas": tuple(foreign.ADAM["betas"])})

    def step(number: int) -> float:
        ids, labels = foreign.batch(number, rank * foreign.ROWS_A_RANK, foreign.ROWS_A_RANK)
        loss = foreign.loss_of(model(ids), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        return float(total) / world_size

    for number in range(foreign.STEPS):
        step(number)
    weights, states = get_state_dict(model, optimizer)
    flattened = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
    rest = {"step": foreign.STEPS, "note": "made by a test", "table": {"lr": [0.5]}, "odd": {1, 2}}
    dcp.save({"model": weights, "optim": states, **rest}, checkpoint_id=f"{folder}/nested")
    dcp.save(
        {**weights, "optimizer": flattened, "train_state": {"step": torch.tensor(3)}}, checkpoint_id=f"{folder}/titan"
    )
    dcp.save(weights, checkpoint_id=f"{folder}/flat")
    dcp.save({"model": weights, "optim": optimizer.state_dict()}, checkpoint_id=f"{folder}/by_number")

    def whole(tensor):
        return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()

    live = {f"weight/{name}": whole(tensor) for name, tensor in weights.items() if name != "head.weight"}
    live["buffer/offset"] = live.pop("weight/offset")
    for name, kinds in states["state"].items():
        live |= {f"{kind}/{name}": whole(tensor) for kind, tensor in kinds.items() if kind != "step"}
    losses = [step(foreign.STEPS + number) for number in range(foreign.NEXT_STEPS)]
    return {"live": {name: tensor.numpy() for name, tensor in live.items()}, "losses": losses}


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory):
    """The folder, the live state by kind/name, and the losses of the next steps."""
    folder = tmp_path_factory.mktemp("dcp")
    found = ranks(2).run(save_with_fsdp2, str(folder))[0]
    return folder, {name: torch.from_numpy(array) for name, array in found["live"].items()}, found["losses"]


@pytest.mark.parametrize("layout", ["nested", "titan"])
def test_weights_moments_step_and_values_are_those_of_the_live_objects(layout: str, saved, tmp_path: Path):
    folder, live, _ = saved
    source = convert(folder / layout, tmp_path)
    found = tensors_of(source)
    assert same_bits(found, live) == []
    # which of the two these are, DCP does not say: they go as both
    assert set(found) - set(live) == {"weight/offset", "buffer/fixed"}
    assert (source.step, source.aliases) == (3, {"head.weight": "embed.weight"})
    if layout == "nested":
        assert source.client == {"step": 3, "note": "made by a test", "table.lr": [0.5]}
        assert any(note.startswith("odd is left out") for note in source.notes)
    stored = merged(str(tmp_path))
    assert same_bits(stored, {name: tensor.reshape(-1) for name, tensor in live.items()}) == []


@pytest.mark.parametrize(("stage", "world_size"), [(2, 1), pytest.param(3, 3, marks=pytest.mark.slow)])
def test_training_goes_on_at_another_stage_and_world_size(stage: int, world_size: int, saved, tmp_path: Path, ranks):
    folder, live, losses = saved
    convert(folder / "nested", tmp_path / "c")
    if world_size == 3:  # four rows do not divide: only what is loaded is compared
        found = ranks(world_size).run(reload, str(tmp_path / "c"), stage)
        assert found[0] == 3
    else:
        found = ranks(world_size).run(go_on, str(tmp_path / "c"), stage, False, {})
        assert found[0]["losses"] == pytest.approx(losses, rel=1e-6)
    again = merged(f"{tmp_path}/c-again-{stage}-{world_size}")
    assert same_bits(again, {name: tensor.reshape(-1) for name, tensor in live.items()}) == []


def reload(rank: int, world_size: int, folder: str, stage: int) -> int:
    """Load and save again."""
    import raydz.engine

    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": foreign.ADAM},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 4},
    }
    engine = raydz.engine.initialize(foreign.Foreign(), config, device="cpu")
    engine.load_checkpoint(folder)
    engine.save_checkpoint(f"{folder}-again-{stage}-{world_size}")
    engine.destroy()
    return engine.global_steps


def test_a_state_dict_of_weights_alone_is_all_weights_unless_told(saved):
    folder, live, _ = saved
    found = tensors_of(open_source(str(folder / "flat")))
    assert same_bits(found, {name: tensor for name, tensor in live.items() if name.startswith("weight/")}) == []
    assert "weight/offset" in found and "weight/head.weight" in found
    told = tensors_of(open_source(str(folder / "flat"), buffers=("off*",)))
    assert "weight/offset" not in told and torch.equal(told["buffer/offset"], live["buffer/offset"])
    with pytest.raises(CheckpointError, match="matches nothing"):
        open_source(str(folder / "flat"), buffers=("nothing*",))


def test_states_by_number_are_refused_but_weights_can_be_had(saved):
    folder, live, _ = saved
    with pytest.raises(CheckpointError, match=r"go by number[\s\S]*get_state_dict"):
        open_source(str(folder / "by_number"))
    found = tensors_of(open_source(str(folder / "by_number"), weights_only=True, model_key="model"))
    assert same_bits(found, {name: tensor for name, tensor in live.items() if name.startswith("weight/")}) == []


# -- what is wrong with a folder ---------------------------------------------------------------------------------------


@pytest.fixture
def copy(saved, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved[0] / "nested", tmp_path / "copy"))


class Planted:
    """Its pickle makes a folder when it is loaded by Python's own rules."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_planted_pickle_in_the_metadata_does_not_run(copy: Path, tmp_path: Path):
    trace = tmp_path / "ran"
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.planner_data["extra"] = Planted(str(trace))
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"nothing of it was run[\s\S]*mkdir"):
        open_source(str(copy))
    assert not trace.exists()
    pickle.loads((copy / ".metadata").read_bytes())
    assert trace.exists()  # so it would have run


@pytest.mark.parametrize(
    "code",
    [
        b"cbuiltins\neval\n(S'1+1'\ntR.",  # protocol 0's way to name a function
        b"\x80\x04\x8c\x05torch\x8c\x0cSize.__new__\x93.",  # a name with dots
        b"\x80\x04\x82\x01.",  # the extension registry
        b"\x80\x02Pid\n.",  # a persistent id
        b"garbage",
        b"",
        pickle.dumps({"a": 1}),
    ],
)
def test_other_ways_into_the_unpickler_are_closed(code: bytes):
    with pytest.raises(CheckpointError):
        read_metadata(code, "here")


def test_a_planted_pickle_in_a_value_does_not_run(copy: Path, tmp_path: Path):
    import torch.distributed.checkpoint as dcp

    trace, folder = tmp_path / "ran", tmp_path / "planted"
    with pytest.warns(UserWarning, match="single process"):
        dcp.save({"model": {"w": torch.ones(2)}, "note": Planted(str(trace))}, checkpoint_id=folder)
    source = open_source(str(folder), model_key="model")
    assert source.client == {} and any(note.startswith("note is left out") for note in source.notes)
    assert not trace.exists()


def test_a_missing_file_and_a_cut_one_are_named(copy: Path):
    data = copy / "__1_0.distcp"
    data.write_bytes(data.read_bytes()[:2000])
    with pytest.raises(CheckpointError, match=r"damaged[\s\S]*__1_0.distcp"):
        tensors_of(open_source(str(copy)))
    data.unlink()
    with pytest.raises(CheckpointError, match=r"file of the checkpoint is missing[\s\S]*__1_0.distcp"):
        open_source(str(copy))


def test_a_chunk_that_is_missing_in_the_metadata_is_found(copy: Path):
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    metadata.state_dict_metadata["model.up.weight"].chunks.pop()
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"do not cover it once[\s\S]*up.weight"):
        open_source(str(copy))


def test_a_path_out_of_the_folder_is_not_followed(copy: Path):
    shutil.copy(copy / "__0_0.distcp", copy.parent / "outside.distcp")
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = info.relative_path.replace("__0_0", "../outside")
    (copy / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="missing"):
        open_source(str(copy))

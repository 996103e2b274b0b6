"""Exports as files: shards, dtypes, order of writing, memory, S3, and what is not overwritten."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from raydz.errors import CheckpointError
from raydz.hf import Source, SourceTensor, export_folder, export_single, open_source, write_checkpoint
from raydz.ops.rounding import split_reference
from raydz.storage import S3Options, open_store

TENSORS = {
    "a.weight": torch.randn(10, 7, generator=torch.Generator().manual_seed(1)),
    "b.weight": torch.randn(5, generator=torch.Generator().manual_seed(2)).bfloat16(),
    "c.big": torch.randn(300, 3, generator=torch.Generator().manual_seed(3)),
    "d.scalar": torch.tensor(2.5),
    "e.empty": torch.zeros(0, 4),
    "f.half": torch.randn(9).half(),
    "h.ties": torch.tensor([1 + 2**-8, -(1 + 2**-8), 1 + 3 * 2**-8]),  # between two bf16 numbers
}
BUFFERS = {"g.count": torch.tensor([3, 4])}


def source_of(tensors: dict[str, Tensor], buffers: dict[str, Tensor] | None = None) -> Source:
    def item(name: str, kind: str, tensor: Tensor) -> SourceTensor:
        return SourceTensor(name, kind, tensor.dtype, tuple(tensor.shape), lambda: tensor)

    found = [item(name, "weight", tensor) for name, tensor in tensors.items()]
    found += [item(name, "buffer", tensor) for name, tensor in (buffers or {}).items()]
    return Source("a test's", "here", found, aliases={"z": "a.weight"}, step=7)


def read_all(folder: Path) -> dict[str, Tensor]:
    return {n: t for path in sorted(folder.glob("*.safetensors")) for n, t in load_file(path).items()}


@pytest.mark.parametrize(("shard_bytes", "num_files"), [(1 << 30, 1), (1000, 3), (1, 8)])
def test_shards_hold_everything_once_and_are_no_larger_than_asked(shard_bytes: int, num_files: int, tmp_path: Path):
    export = export_folder(source_of(TENSORS, BUFFERS), open_store(str(tmp_path)), shard_bytes=shard_bytes)
    found = read_all(tmp_path)
    assert len(export.files) == num_files and set(found) == {*TENSORS, *BUFFERS}
    for name, tensor in {**TENSORS, **BUFFERS}.items():
        assert torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype, name
    for name in export.files:
        with safe_open(str(tmp_path / name), "pt") as file:
            assert file.metadata()["format"] == "pt"
            sizes = [file.get_tensor(key).nbytes for key in file.keys()]  # noqa: SIM118
        assert sum(sizes) <= shard_bytes or len([size for size in sizes if size]) == 1
    if num_files > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert index["metadata"]["total_size"] == sum(t.nbytes for t in found.values())
        assert all(name in load_file(tmp_path / file) for name, file in index["weight_map"].items())


def test_what_commits_a_folder_is_written_last(tmp_path: Path):
    store, order = open_store(str(tmp_path)), []
    put, writer = store.put, store.writer

    class Recording:
        uri, exists = store.uri, staticmethod(store.exists)

        def put(self, key, data, **options):
            order.append(key)
            put(key, data, **options)

        def writer(self, key, expected_bytes=None):
            order.append(key)
            return writer(key, expected_bytes)

    others = {"tokenizer.json": b"{}"}
    export_folder(source_of(TENSORS), Recording(), config_json={"a": 1}, others=others, shard_bytes=1000)
    assert order[:2] == ["tokenizer.json", "config.json"] and order[-1] == "model.safetensors.index.json"
    assert len(order) == 6


def test_a_cast_to_bf16_is_the_one_of_training_and_leaves_integers(tmp_path: Path):
    export_folder(source_of(TENSORS, BUFFERS), open_store(str(tmp_path)), dtype=torch.bfloat16, config_json={})
    found = read_all(tmp_path)
    for name in ("a.weight", "c.big", "h.ties"):
        wanted = torch.empty_like(TENSORS[name], dtype=torch.bfloat16)
        split_reference(TENSORS[name], wanted, torch.empty_like(TENSORS[name], dtype=torch.int16))
        assert torch.equal(found[name], wanted)
    assert {found[name].dtype for name in TENSORS} == {torch.bfloat16} and found["g.count"].dtype == torch.int64
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_a_single_file_keeps_the_names_of_tied_parameters_and_comes_back(tmp_path: Path):
    export_single(source_of(TENSORS, BUFFERS), open_store(str(tmp_path)), "all.safetensors")
    again = open_source(str(tmp_path / "all.safetensors"))
    assert again.aliases == {"z": "a.weight"}
    kinds = {item.name: item.kind for item in again.tensors}
    assert kinds == {**dict.fromkeys(TENSORS, "weight"), **dict.fromkeys(BUFFERS, "buffer")}
    assert all(torch.equal(item.read(), {**TENSORS, **BUFFERS}[item.name]) for item in again.tensors)


def test_nothing_is_overwritten(tmp_path: Path):
    store = open_store(str(tmp_path))
    export_folder(source_of(TENSORS), store)
    before = (tmp_path / "model.safetensors").read_bytes()
    with pytest.raises(CheckpointError, match="weights here already"):
        export_folder(source_of(BUFFERS), store, shard_bytes=1)
    with pytest.raises(CheckpointError, match="there already"):
        export_single(source_of(TENSORS), store, "model.safetensors")
    write_checkpoint(source_of(TENSORS), store)
    with pytest.raises(CheckpointError, match="checkpoint of this step already"):
        write_checkpoint(source_of(TENSORS), store)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_one_tensor_at_a_time_is_in_memory(tmp_path: Path):
    """Of 64 tensors each way; counted by the tensors themselves."""
    import weakref

    alive: weakref.WeakSet = weakref.WeakSet()
    most = 0

    def make(number: int) -> Tensor:
        nonlocal most
        tensor = torch.full((1000,), float(number))
        alive.add(tensor)
        most = max(most, len(alive))
        return tensor

    items = [SourceTensor(f"t{n}", "weight", torch.float32, (1000,), lambda n=n: make(n)) for n in range(64)]
    source = Source("a test's", "here", items)
    export_folder(source, open_store(str(tmp_path / "hf")), dtype=torch.bfloat16)
    export_folder(source, open_store(str(tmp_path / "shards")), shard_bytes=10_000)
    write_checkpoint(source, open_store(str(tmp_path / "c")))
    assert most <= 2  # one that is written and, until its name is bound anew, the one before


@pytest.mark.s3
def test_a_folder_on_s3_is_written_and_read(s3_env):
    uri, options = f"s3://{s3_env.bucket()}/models/a", S3Options(endpoint_url=s3_env.endpoint_url)
    export_folder(source_of(TENSORS, BUFFERS), open_store(uri, options), shard_bytes=1000, config_json={"a": 1})
    source = open_source(uri, options)
    assert source.config_json == {"a": 1, "dtype": "float32", "torch_dtype": "float32"}
    assert all(torch.equal(item.read(), {**TENSORS, **BUFFERS}[item.name]) for item in source.tensors)
    write_checkpoint(source, open_store(f"{uri}/checkpoints", options))
    again = open_source(f"{uri}/checkpoints", options)
    assert {item.name for item in again.tensors} == {*TENSORS, *BUFFERS} - {"e.empty"}


# -- folders that are not whole ----------------------------------------------------------------------------------------


def test_a_shard_that_is_cut_missing_or_wrong_is_named(tmp_path: Path):
    export_folder(source_of(TENSORS), open_store(str(tmp_path)), shard_bytes=1000)
    shard = tmp_path / "model-00002-of-00003.safetensors"
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"cut off[\s\S]*00002"):
        open_source(str(tmp_path))
    shard.unlink()
    with pytest.raises(CheckpointError, match=r"missing[\s\S]*00002"):
        open_source(str(tmp_path))
    save_file({"other": torch.ones(1)}, shard)
    with pytest.raises(CheckpointError, match=r"lack tensors[\s\S]*c.big"):
        open_source(str(tmp_path))
    shard.write_bytes(b"\xff" * 100)
    with pytest.raises(CheckpointError, match="not a safetensors file"):
        open_source(str(tmp_path))


def test_pickled_weights_and_unknown_folders_are_refused(tmp_path: Path):
    with pytest.raises(CheckpointError, match="no checkpoint that raydz knows"):
        open_source(str(tmp_path))
    torch.save({"a": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin[\s\S]*save_pretrained"):
        open_source(str(tmp_path))

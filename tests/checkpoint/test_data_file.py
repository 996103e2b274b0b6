"""A rank's data file: the header's place, the order of pieces, and sums that are CRC-32C's by definition, or zlib's."""

from __future__ import annotations

import json
import sys
import zlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from raydz.checkpoint import StatePiece, data_file
from raydz.checkpoint.checksums import crc_function
from raydz.checkpoint.data_file import ChunkSums, plan_file, write_file
from raydz.checkpoint.pieces import DTYPE_NAMES
from raydz.errors import CheckpointError, LayoutError
from raydz.storage import open_store

KINDS = list(DTYPE_NAMES)


def piece(name: str, tensor: torch.Tensor, start: int = 0, kind: str = "weight") -> StatePiece:
    stop = start + tensor.numel()
    return StatePiece((name,), kind, DTYPE_NAMES[tensor.dtype], (stop,), start, stop, lambda: tensor, None)


def random_tensor(dtype: torch.dtype, numel: int) -> torch.Tensor:
    values = torch.randint(
        0, 2 if dtype == torch.bool else 100, (numel,), generator=torch.Generator().manual_seed(numel)
    )
    return values.to(dtype)


@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 700), st.integers(0, 99)), max_size=8))
@settings(deadline=None)
def test_safetensors_reads_what_was_written(tmp_path_factory, parts):
    folder = tmp_path_factory.mktemp("files")
    pieces = [piece(f"a.{i}", random_tensor(dtype, numel), start) for i, (dtype, numel, start) in enumerate(parts)]
    plan = plan_file(pieces)
    with open_store(str(folder)).writer("x/y.safetensors") as out:
        receipt = write_file(plan, out, "y.safetensors")
    data = (folder / "x/y.safetensors").read_bytes()
    assert receipt.bytes == plan.total_bytes == len(data)
    assert (8 + int.from_bytes(data[:8], "little")) % 4096 == 0
    with safe_open(folder / "x/y.safetensors", "pt") as opened:
        assert opened.metadata() == {"format": "raydz-1"}
        assert set(opened.keys()) == {f"weight/{p.name}[{p.start}:{p.stop}]" for p in pieces}
        for p in pieces:
            assert torch.equal(opened.get_tensor(f"weight/{p.name}[{p.start}:{p.stop}]"), p.read())


def test_wide_elements_come_first_so_that_none_straddles_a_chunk():
    pieces = [piece(str(dtype), random_tensor(dtype, 5)) for dtype in KINDS]
    plan = plan_file(pieces[::-1])
    widths = [p.read().element_size() for p in plan.pieces]
    assert widths == sorted(widths, reverse=True)
    for offset, width in zip(plan.offsets, widths, strict=True):
        assert offset % width == 0 and data_file.CHUNK_BYTES % width == 0


def crc32c_by_definition(data: bytes) -> int:
    """The remainder by the Castagnoli polynomial, bit by bit (RFC 3720, appendix B.4)."""
    register = 0xFFFFFFFF
    for byte in data:
        register ^= byte
        for _ in range(8):
            register = register >> 1 ^ (0x82F63B78 if register & 1 else 0)
    return register ^ 0xFFFFFFFF


@pytest.mark.parametrize(("algorithm", "reference"), [("crc32c", crc32c_by_definition), ("crc32", zlib.crc32)])
def test_sums_of_chunks_and_of_the_whole_fit_their_definition(tmp_path, monkeypatch, algorithm, reference):
    monkeypatch.setattr(data_file, "CHUNK_BYTES", 1000)
    monkeypatch.setattr(data_file, "_WRITE_BYTES", 700)
    if algorithm == "crc32":
        monkeypatch.setitem(sys.modules, "awscrt.checksums", None)  # as where it is not installed
    plan = plan_file([piece("w", torch.arange(1234.0)), piece("v", torch.arange(7, dtype=torch.int8))])
    with open_store(str(tmp_path)).writer("f") as out:
        receipt = write_file(plan, out, "f")
    data = (tmp_path / "f").read_bytes()
    assert receipt.chunk_crcs == tuple(reference(data[i : i + 1000]) for i in range(0, len(data), 1000))
    assert receipt.crc == reference(data)
    assert (receipt.chunk_bytes, receipt.algorithm) == (1000, algorithm)


@given(st.lists(st.binary(max_size=50), max_size=12), st.integers(1, 40))
def test_sums_do_not_depend_on_how_the_stream_is_cut(parts, chunk):
    usual = data_file.CHUNK_BYTES
    data_file.CHUNK_BYTES = chunk
    try:
        sums = ChunkSums()
        for part in parts:
            sums.update(memoryview(part))
        whole = b"".join(parts)
        assert sums.finish() == tuple(crc32c_by_definition(whole[i : i + chunk]) for i in range(0, len(whole), chunk))
        assert sums.whole == crc32c_by_definition(whole)
    finally:
        data_file.CHUNK_BYTES = usual


def test_checksum_that_this_machine_cannot_compute_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "awscrt.checksums", None)
    with pytest.raises(CheckpointError, match=r"(?s)need awscrt.*pip install"):
        crc_function("crc32c", "here")
    with pytest.raises(CheckpointError, match=r"(?s)unknown checksum.*md5"):
        crc_function("md5", "here")


def test_elements_are_little_endian(tmp_path):
    plan = plan_file([piece("w", torch.tensor([1.0, -2.5]))])
    with open_store(str(tmp_path)).writer("f") as out:
        write_file(plan, out, "f")
    assert (tmp_path / "f").read_bytes()[plan.offsets[0] :] == np.array([1.0, -2.5], "<f4").tobytes()


def test_header_is_json_padded_with_spaces():
    plan = plan_file([piece("w", torch.zeros(3), start=2, kind="exp_avg")])
    header = json.loads(plan.header[8:])
    assert header["exp_avg/w[2:5]"] == {"dtype": "F32", "shape": [3], "data_offsets": [0, 12]}
    assert len(plan.header) == 4096 and plan.header.rstrip(b" ").endswith(b"}}")


def test_dtype_that_has_no_name_is_refused():
    from tests.checkpoint.states import Setup, build

    engine = build(Setup())
    engine.module.register_buffer("wave", torch.zeros(2, dtype=torch.complex64))
    with pytest.raises(LayoutError, match="dtype") as caught:
        engine.save_checkpoint("never-written")
    assert caught.value.where == "wave"
    engine.destroy()

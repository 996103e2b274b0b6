"""Whole checkpoints read without an engine: damage of every kind is named, and all of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from raydz.checkpoint import open_checkpoint
from raydz.checkpoint import verify as module
from raydz.checkpoint.manifest import DataFile
from raydz.checkpoint.verify import checked_blocks, verify_checkpoint
from raydz.storage.local import LocalStore
from tests.checkpoint.states import CHUNK, Setup, data_files, only_checkpoint, train_and_save

GOLDEN = sorted(Path(__file__).parent.glob("golden*/**/manifest.json"))


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks(2).run(train_and_save, Setup(stage=2), str(root), 2)
    return root


@pytest.fixture
def saved(pristine, tmp_path) -> Path:
    shutil.copytree(pristine, tmp_path / "run")
    return tmp_path / "run"


def verify(root: Path, **options):
    store = LocalStore(root)
    folder, manifest = open_checkpoint(store)
    return verify_checkpoint(store, folder, manifest, **options)


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x20
    path.write_bytes(data)


def name(path: Path, root: Path) -> str:
    return path.relative_to(only_checkpoint(root)).as_posix()


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("threads", [1, 2, 8])
def test_a_whole_checkpoint_has_no_damage(saved, quick, threads):
    seen = []
    assert verify(saved, quick=quick, threads=threads, done=seen.append) == []
    assert sum(seen) == (0 if quick else sum(path.stat().st_size for path in data_files(saved)))


def test_what_earlier_releases_wrote_has_no_damage():
    assert len(GOLDEN) >= 2
    for manifest in GOLDEN:
        assert verify(manifest.parent) == []


@pytest.mark.parametrize("chunks_in_a_block", [1, 3, 1000])
def test_every_flipped_bit_is_found_by_file_and_chunk(saved, monkeypatch, chunks_in_a_block):
    monkeypatch.setattr(module, "_BLOCK_BYTES", chunks_in_a_block * CHUNK)
    assert verify(saved) == []
    first, second = data_files(saved)
    size = second.stat().st_size
    flip(first, 3 * CHUNK + 7)
    for position in (0, CHUNK, size - 1):
        flip(second, position)
    damage = verify(saved)
    assert [item.file for item in damage] == [name(first, saved), name(second, saved)]
    assert damage[0].chunks == (3,)
    assert damage[1].chunks == (0, 1, (size - 1) // CHUNK)


def test_quick_sees_no_flipped_bit_but_what_is_missing_or_cut(saved):
    first, second = data_files(saved)
    flip(first, 5000)
    assert verify(saved, quick=True) == []
    size = first.stat().st_size
    first.write_bytes(first.read_bytes()[:-1])
    second.unlink()
    for quick in (True, False):
        cut, missing = verify(saved, quick=quick)
        assert cut.what == f"has {size - 1} bytes instead of {size}" and cut.file == name(first, saved)
        assert missing.what == "is missing" and missing.file == name(second, saved)


def test_swapped_files_are_damaged(saved):
    first, second = data_files(saved)
    contents = [path.read_bytes() for path in (first, second)]
    first.write_bytes(contents[1][: len(contents[0])].ljust(len(contents[0])))
    second.write_bytes(contents[0][: len(contents[1])].ljust(len(contents[1])))
    assert [bool(item.chunks) for item in verify(saved)] == [True, True]


def test_a_checksum_of_the_whole_that_fits_no_chunks_is_told(saved):
    store = LocalStore(saved)
    folder, manifest = open_checkpoint(store)
    right = manifest.files[0]
    wrong = DataFile(right.path, right.bytes, right.chunk_bytes, right.chunk_crcs, right.crc ^ 1, right.algorithm)
    damage = module.verify_file(store, folder, wrong)
    assert damage is not None and "the whole file" in damage.what


@pytest.mark.parametrize("ahead", [1, 3, 100])
def test_blocks_come_in_order_and_are_the_file(saved, monkeypatch, ahead):
    monkeypatch.setattr(module, "_BLOCK_BYTES", 3 * CHUNK)
    store = LocalStore(saved)
    folder, manifest = open_checkpoint(store)
    for path, data_file in zip(data_files(saved), manifest.files, strict=True):
        etag = store.head(f"{folder}/{data_file.path}").etag
        blocks = list(checked_blocks(store, folder, data_file, etag, ahead))
        assert len(blocks) > 3 and all(len(block.data) == 3 * CHUNK for block in blocks[:-1])
        assert b"".join(block.data for block in blocks) == path.read_bytes()


def test_a_reader_that_stops_early_leaves_no_threads(saved):
    import threading

    store = LocalStore(saved)
    folder, manifest = open_checkpoint(store)
    etag = store.head(f"{folder}/{manifest.files[0].path}").etag
    blocks = checked_blocks(store, folder, manifest.files[0], etag, 2)
    next(blocks)
    blocks.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("raydz-verify")]

"""Copies: the same bytes at the target, never a damaged one, and a copy that goes on after it was killed."""

from __future__ import annotations

import filecmp
import shutil
from pathlib import Path

import pytest

from raydz.checkpoint import open_checkpoint
from raydz.checkpoint.copy import Place, copy_checkpoint
from raydz.errors import CheckpointError, StorageError
from raydz.storage import S3Options, open_store
from raydz.storage.local import LocalStore
from tests.checkpoint.states import Setup, build, data_files, only_checkpoint, train_and_save


@pytest.fixture(scope="module")
def pristine(ranks, tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("saved")
    ranks(2).run(train_and_save, Setup(stage=2), str(root), 2)
    return root


@pytest.fixture
def saved(pristine, tmp_path) -> Path:
    """A checkpoint's folder, to be damaged."""
    return Path(shutil.copytree(only_checkpoint(pristine), tmp_path / "source"))


def places(saved: Path, tmp_path: Path) -> tuple[Place, Place]:
    return Place(LocalStore(saved)), Place(LocalStore(tmp_path / "copies"), "a/b")


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def assert_same_files(first: Path, second: Path) -> None:
    assert files(first) == files(second)
    assert filecmp.cmpfiles(first, second, files(first), shallow=False)[1:] == ([], [])


@pytest.mark.parametrize("threads", [1, 8])
def test_a_copy_is_the_same_to_the_byte_and_loads(saved, tmp_path, threads):
    source, target = places(saved, tmp_path)
    seen = []
    copied = copy_checkpoint(source, target, threads=threads, done=seen.append)
    assert_same_files(saved, tmp_path / "copies/a/b")
    total = sum(path.stat().st_size for path in data_files(saved))
    assert (copied.num_copied, copied.num_kept, copied.num_bytes) == (2, 0, total) and sum(seen) == total
    engine = build(Setup())
    engine.load_checkpoint(tmp_path / "copies/a/b")
    engine.destroy()


def test_files_that_the_manifest_does_not_name_are_left_behind(saved, tmp_path):
    shutil.copytree(data_files(saved)[0].parent, saved / "0123abcd")
    source, target = places(saved, tmp_path)
    copy_checkpoint(source, target)
    assert len(files(tmp_path / "copies/a/b")) == 3


@pytest.mark.parametrize("damage", ["flip", "cut", "missing"])
def test_a_damaged_source_makes_no_checkpoint(saved, tmp_path, damage):
    path = data_files(saved)[1]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(data if damage == "flip" else data[:-1])
    source, target = places(saved, tmp_path)
    with pytest.raises(CheckpointError, match={"flip": "checksum", "cut": "wrong size", "missing": "missing"}[damage]):
        copy_checkpoint(source, target)
    assert not any(name.endswith("manifest.json") for name in files(tmp_path / "copies"))
    assert path.name not in {Path(name).name for name in files(tmp_path / "copies")}


def test_a_copy_that_broke_off_goes_on(saved, tmp_path, monkeypatch):
    source, target = places(saved, tmp_path)
    usual = LocalStore.writer

    def writer(self, key, expected_bytes=None):
        if "rank-00001" in key:
            raise StorageError("the cable")
        return usual(self, key, expected_bytes)

    with monkeypatch.context() as broken:
        broken.setattr(LocalStore, "writer", writer)
        with pytest.raises(StorageError, match="the cable"):
            copy_checkpoint(source, target, threads=1)
    assert len(files(tmp_path / "copies")) == 1
    copied = copy_checkpoint(source, target)
    assert (copied.num_copied, copied.num_kept) == (1, 1)
    assert_same_files(saved, tmp_path / "copies/a/b")
    again = copy_checkpoint(source, target)
    assert (again.num_copied, again.num_kept) == (0, 2)


def test_a_file_that_is_there_is_believed_only_if_its_checksums_fit(saved, tmp_path):
    source, target = places(saved, tmp_path)
    path = tmp_path / "copies/a/b" / data_files(saved)[0].relative_to(saved)
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(data_files(saved)[0].stat().st_size))
    assert copy_checkpoint(source, target).num_copied == 2
    assert_same_files(saved, tmp_path / "copies/a/b")


def test_another_checkpoint_at_the_target_is_never_touched(saved, pristine, tmp_path):
    train_and_save(0, 1, Setup(), str(tmp_path / "other"), 1)
    other = only_checkpoint(tmp_path / "other")
    before = {name: (other / name).read_bytes() for name in files(other)}
    with pytest.raises(CheckpointError, match="another checkpoint is there"):
        copy_checkpoint(Place(LocalStore(saved)), Place(LocalStore(other)))
    assert {name: (other / name).read_bytes() for name in files(other)} == before


def test_the_manifest_is_put_last(saved, tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(LocalStore, "writer", _noting(LocalStore.writer, made))
    monkeypatch.setattr(LocalStore, "put", _noting(LocalStore.put, made))
    copy_checkpoint(*places(saved, tmp_path))
    assert [name.rpartition("/")[2] == "manifest.json" for name in made] == [False, False, True]


def _noting(usual, made):
    def noting(self, key, *args, **kwargs):
        made.append(key)
        return usual(self, key, *args, **kwargs)

    return noting


@pytest.mark.s3
def test_to_a_bucket_and_back(saved, s3_env, tmp_path):
    bucket = open_store(f"s3://{s3_env.bucket()}/copies", S3Options(endpoint_url=s3_env.endpoint_url))
    copy_checkpoint(Place(LocalStore(saved)), Place(bucket, "one"))
    copy_checkpoint(Place(bucket, "one"), Place(bucket, "two"))
    copy_checkpoint(Place(bucket, "two"), Place(LocalStore(tmp_path / "back")))
    assert_same_files(saved, tmp_path / "back")
    assert open_checkpoint(bucket, "two")[1].step == 2

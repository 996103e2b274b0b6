"""Which files a path means."""

from __future__ import annotations

import os

import pytest

from raydz.data.files import list_files
from raydz.errors import ConfigError, DataError


def make(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def names(path, root):
    return [os.path.relpath(file.path, root) for file in list_files(str(path))]


def test_folder_is_read_recursively_sorted_without_hidden_and_foreign_files(tmp_path):
    make(tmp_path, "b.txt", "a/z.jsonl", "_SUCCESS", ".x.txt", "_old/c.txt", "notes.md", "c.txt.gz", "d.parquet.gz")
    assert names(tmp_path, tmp_path) == ["a/z.jsonl", "b.txt", "c.txt.gz"]


@pytest.mark.parametrize(
    ("glob", "found"),
    [
        ("*.txt", ["a1.txt", "a2.txt", "b.txt"]),
        ("a?.txt", ["a1.txt", "a2.txt"]),
        ("a[1]*", ["a1.txt"]),
        ("a[!1].txt", ["a2.txt"]),
        ("**/*.txt", ["a1.txt", "a2.txt", "b.txt", "deep/er/c.txt"]),
        ("*/*/*.txt", ["deep/er/c.txt"]),
    ],
)
def test_glob_means_what_the_shell_means(tmp_path, glob, found):
    make(tmp_path, "a1.txt", "a2.txt", "b.txt", "deep/er/c.txt")
    assert names(f"{tmp_path}/{glob}", tmp_path) == found


def test_a_file_whose_name_looks_like_a_glob_is_itself(tmp_path):
    make(tmp_path, "a[1].txt", "a1.txt")
    assert names(tmp_path / "a[1].txt", tmp_path) == ["a[1].txt"]


@pytest.mark.parametrize("path", ["nowhere.txt", "no*.txt", "nowhere/"])
def test_missing_path_is_named(tmp_path, path):
    with pytest.raises(DataError) as caught:
        list_files(f"{tmp_path}/{path}")
    assert path in str(caught.value)


def test_empty_file_is_named(tmp_path):
    make(tmp_path, "a.txt")
    (tmp_path / "b.txt").touch()
    with pytest.raises(DataError, match=r"empty(.|\n)*b\.txt"):
        list_files(str(tmp_path))


def test_unknown_format_says_which_are_known(tmp_path):
    make(tmp_path, "a.docx")
    with pytest.raises(DataError, match=r"a\.docx(.|\n)*\.parquet"):
        list_files(str(tmp_path / "a.docx"))


@pytest.mark.parametrize("path", ["gs://bucket/x.txt", "sample:nothing"])
def test_unknown_scheme_or_sample_is_a_config_error(path):
    with pytest.raises(ConfigError, match="wanted"):
        list_files(path)


def test_version_changes_with_the_file_and_not_with_the_reading(tmp_path):
    make(tmp_path, "a.txt")
    before = list_files(str(tmp_path))[0].version
    assert list_files(str(tmp_path))[0].version == before
    os.utime(tmp_path / "a.txt", ns=(1, 1))
    assert list_files(str(tmp_path))[0].version != before

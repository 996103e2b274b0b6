"""What travels is what Ray sends: measured against the archive that Ray itself makes."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest
from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from raydz.errors import ConfigError
from raydz.orchestrate.package import check_size, survey


@pytest.fixture
def project(tmp_path: Path) -> Path:
    files = {
        "jobs/train.py": 900, "run.yaml": 40, ".gitignore": 0, ".rayignore": 0, "data/corpus.txt": 70_000,
        "data/.gitignore": 0, "data/held.bin": 5_000, "logs/a.log": 3_000, ".git/objects/pack": 9_000,
        ".venv/lib/x.py": 8_000, "jobs/__pycache__/train.pyc": 700, "big.ckpt": 60_000, "größe.txt": 11,
    }  # fmt: skip
    for name, size in files.items():
        path = tmp_path / "project" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * size)
    root = tmp_path / "project"
    (root / "empty").mkdir()
    (root / ".gitignore").write_text("*.log\n")
    (root / ".rayignore").write_text("*.ckpt\n")
    (root / "data" / ".gitignore").write_text("held.bin\n")
    return root


@pytest.mark.parametrize("excludes", [[], ["data/"]], ids=["plain", "excludes"])
@pytest.mark.parametrize("reads_gitignore", [True, False])
def test_files_and_size_are_those_of_rays_own_archive(project, tmp_path, monkeypatch, excludes, reads_gitignore):
    if not reads_gitignore:
        monkeypatch.setenv("RAY_RUNTIME_ENV_IGNORE_GITIGNORE", "1")
    archive = tmp_path / "package.zip"
    create_package(
        str(project), archive, include_gitignore=reads_gitignore,
        excludes=[*get_runtime_env_default_excludes(), *excludes],
    )  # fmt: skip
    package = survey(project, excludes)
    with zipfile.ZipFile(archive) as made:
        assert package.files == {entry.filename: entry.file_size for entry in made.infolist()}
    assert package.total_bytes == archive.stat().st_size
    assert ("logs/a.log" in package.files) is not reads_gitignore


def test_a_directory_that_is_too_large_is_refused_with_its_largest_files(project):
    package = survey(project)
    check_size(package, limit_bytes=package.total_bytes)
    with pytest.raises(ConfigError) as caught:
        check_size(package, limit_bytes=package.total_bytes - 1)
    assert "data/corpus.txt 68.4 KiB" in caught.value.got and "big.ckpt" not in caught.value.got
    assert ".rayignore" in caught.value.remedy and "--exclude" in caught.value.remedy


def test_words_of_the_command_that_stay_at_home_are_found(project):
    package = survey(project)
    command = ["python", "./jobs/train.py", "--init", "big.ckpt", "--log", "logs/a.log", "--out", "new.json"]
    assert package.left_out(command) == ["big.ckpt", "logs/a.log"]


def test_what_is_no_folder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="not a folder"):
        survey(tmp_path / "nowhere")

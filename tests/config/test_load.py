"""Files, mappings and the DeepSpeed file that a run may name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raydz.config import BatchSize, check_trainable, load, load_engine
from raydz.errors import ConfigError

from .conftest import REPOSITORY


def test_demo_is_what_it_says(configs, warned):
    demo = load(configs / "demo.yaml")
    check_trainable(demo)
    assert demo.batch(demo.scaling.num_workers) == BatchSize(global_batch=16, micro_batch=4, accumulation=2)
    assert (demo.zero_optimization.stage, demo.compute_dtype) == (3, "fp32")
    assert demo.scheduler.params.total_num_steps == demo.train.steps
    assert demo.data.sources[0].path == "sample:wordnet" and demo.model.vocab_size == 2048
    assert demo.run.name.startswith("demo-") and warned() == ""


def test_deepspeed_file_is_found_beside_the_yaml_file_and_merged(write, tmp_path, monkeypatch):
    write("ds.json", '{"zero_optimization": {"stage": 2}, "optimizer": {"params": {"lr": 1e-4}}, // as it stands\n}')
    path = write("run.yaml", "deepspeed: ds.json\nzero_optimization: {overlap_comm: true}\ntrain: {steps: 5}\n")
    monkeypatch.chdir("/")
    config = load(path)
    assert (config.zero_optimization.stage, config.zero_optimization.overlap_comm) == (2, True)
    assert (config.optimizer.params.lr, config.train.steps) == (1e-4, 5)


def test_deepspeed_section_means_the_same_inline_and_inside():
    inline = load({"zero_optimization": {"stage": 1}, "train_batch_size": 4})
    inside = load({"deepspeed": {"zero_optimization": True, "train_batch_size": 4}})
    assert inside.model_dump() == inline.model_dump()


def test_value_given_inline_and_in_the_deepspeed_file_is_an_error():
    with pytest.raises(ConfigError) as caught:
        load({"train_batch_size": 4, "deepspeed": {"train_batch_size": 8}})
    assert "train_batch_size" in caught.value.where


@pytest.mark.parametrize("name", ["nothing.yaml", "nothing.json"])
def test_missing_file_is_named(tmp_path, name):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load(tmp_path / name)
    assert name in caught.value.where


def test_missing_deepspeed_file_is_named(write):
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load(write("run.yaml", "deepspeed: gone.json"))
    assert "gone.json" in caught.value.where


def test_file_that_is_no_mapping_is_refused(write):
    with pytest.raises(ConfigError, match="mapping"):
        load(write("run.yaml", "- a\n- b\n"))
    with pytest.raises(ConfigError, match="cannot be read"):
        load_engine(write("folder.yaml", "").parent)


def test_empty_file_is_all_defaults(write):
    assert load(write("run.yaml", "# nothing\n")).train.steps == 100


def test_json_run_file_is_read_as_json(write):
    assert load(write("run.json", '{"train": {"steps": 3,},}')).train.steps == 3


def test_loading_a_loaded_configuration_changes_nothing():
    config = load({"train": {"steps": 3}})
    assert load(config) is config


def test_package_imports_neither_torch_nor_other_heavy_packages():
    script = (
        "import sys\n"
        "for name in ('torch', 'ray', 'mlflow', 'pyarrow', 'boto3', 'numpy'): sys.modules[name] = None\n"
        "import raydz.config\n"
        "print(raydz.config.load('jobs/configs/demo.yaml').run.name)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("demo-")

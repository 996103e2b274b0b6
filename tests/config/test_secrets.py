"""Literal credentials are refused by path and never printed, wherever they stand."""

from __future__ import annotations

import logging

import pytest

from raydz.config import load, load_engine
from raydz.errors import ConfigError

# put together at run time, so that scanners of repositories do not take this file for a leak
KEY_ID = "AKIA" + "QWERTYUIOPASDFGH"
SECRET = "wJalrXUt" + "nFEMIK7MDENG"

LEAKS = {
    "storage.aws_access_key_id": KEY_ID,
    "storage.secretAccessKey": SECRET,
    "storage.password": SECRET,
    "tracking.mlflow_token": SECRET,
    "run.root": f"/tmp/{KEY_ID}",
    "tracking.mlflow_uri": f"https://bob:{SECRET}@mlflow.example.org/",
    "storage.endpoint_url": f"https://s3.example.org/?token={SECRET}",
    "checkpoint.dir": f"s3://{KEY_ID}:{SECRET}@bucket/x",
    "comet.api_key": SECRET,
    "model.api_key": SECRET,
}


def nested(path: str, value: str) -> dict:
    for name in reversed(path.split(".")):
        value = {name: value}
    return value


def assert_named_and_hidden(error: ConfigError, path: str, caplog: pytest.LogCaptureFixture) -> None:
    text = f"{error}{error!r}{error.args}{error.__cause__}{caplog.text}"
    assert path in text
    assert KEY_ID not in text and SECRET not in text


@pytest.mark.parametrize("path", LEAKS)
@pytest.mark.parametrize("loader", [load, load_engine])
def test_credential_in_a_mapping_is_named_and_hidden(path, loader, caplog):
    caplog.set_level(logging.DEBUG)
    with pytest.raises(ConfigError, match="literal credential") as caught:
        loader(nested(path, LEAKS[path]))
    assert_named_and_hidden(caught.value, path, caplog)


@pytest.mark.parametrize("path", LEAKS)
def test_credential_in_an_override_is_named_and_hidden(path, caplog):
    with pytest.raises(ConfigError, match="literal credential") as caught:
        load({}, [f"{path}={LEAKS[path]}"])
    assert_named_and_hidden(caught.value, path, caplog)


def test_credential_in_a_deepspeed_file_and_in_a_list_is_found(write, caplog):
    write("ds.json", f'{{"comet": {{"enabled": true, "api_key": "{SECRET}"}}}}')
    with pytest.raises(ConfigError, match="literal credential") as caught:
        load(write("run.yaml", "deepspeed: ds.json"))
    assert_named_and_hidden(caught.value, "comet.api_key", caplog)
    assert "ds.json" in caught.value.where
    with pytest.raises(ConfigError) as caught:
        load({"data": {"sources": ["a.txt", f"s3://u:{SECRET}@b"]}})
    assert_named_and_hidden(caught.value, "data.sources.1", caplog)


def test_override_does_not_hide_a_credential_in_the_file(caplog):
    with pytest.raises(ConfigError, match="literal credential") as caught:
        load({"run": {"root": f"/tmp/{KEY_ID}"}}, ["run.root=runs"])
    assert_named_and_hidden(caught.value, "run.root", caplog)


def test_override_that_is_not_even_yaml_is_looked_at_first(caplog):
    with pytest.raises(ConfigError, match="literal credential") as caught:
        load({}, [f"run.root=[*{KEY_ID}"])
    assert_named_and_hidden(caught.value, "run.root", caplog)


@pytest.mark.parametrize("override", [f"storage {SECRET}", f"storage.{KEY_ID}=1", f"={SECRET}", f"a: {KEY_ID}"])
def test_malformed_override_shows_nothing_that_may_be_secret(override, caplog):
    with pytest.raises(ConfigError) as caught:
        load({}, [override])
    assert_named_and_hidden(caught.value, "override", caplog)


def test_ordinary_values_are_not_taken_for_secrets():
    config = load(
        {
            "data": {"tokenizer": {"vocab_size": 300}, "sources": ["s3://bucket/a@b/x.txt"]},
            "train": {"sample_tokens": 7, "sample_prompt": "the secret garden: token by token"},
            "storage": {"endpoint_url": "http://127.0.0.1:9000/x@y"},
            "tracking": {"mlflow_uri": "http://mlflow:5000"},
        }
    )
    assert config.train.sample_tokens == 7

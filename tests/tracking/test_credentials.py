from __future__ import annotations

import pytest

from raydz.errors import ConfigError
from raydz.tracking.credentials import redact, redact_fields, refuse_credentials

_SECRET = "hunter2hunter2"


@pytest.mark.parametrize(
    "uri",
    [
        f"https://ann:{_SECRET}@mlflow.example.org",
        f"https://{_SECRET}@mlflow.example.org",
        f"https://ann:a/b#{_SECRET}@mlflow.example.org",
        f"postgresql://ann:{_SECRET}@db/mlflow",
        f"postgresql+psycopg2://ann:{_SECRET}@db/mlflow",
        f"mysql://db/mlflow?user=ann&password={_SECRET}",
        f"https://mlflow.example.org/?token={_SECRET}",
    ],
)
def test_a_uri_with_credentials_is_refused_and_not_printed(uri):
    with pytest.raises(ConfigError) as caught:
        refuse_credentials(uri)
    message = str(caught.value)
    assert "MLFLOW_TRACKING_PASSWORD" in message
    assert _SECRET not in message and "ann" not in message


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:5000",
        "https://mlflow.example.org/prefix?workspace=a",
        "sqlite:////runs/a@b:c@d/mlflow.db",
        "postgresql://ann@db/mlflow",
        "databricks",
        "./mlruns",
    ],
)
def test_a_uri_without_credentials_is_accepted(uri):
    refuse_credentials(uri)


@pytest.mark.parametrize(
    "text",
    [
        f"cannot reach https://ann:{_SECRET}@host/x",
        f"password={_SECRET}",
        f'{{"aws_secret_access_key": "{_SECRET}", "b": 1}}',
        f"AWS_SESSION_TOKEN: {_SECRET}",
        f"Authorization: Bearer {_SECRET}",
        f"https://b.s3.amazonaws.com/k?X-Amz-Signature={_SECRET}&x=1",
        f"HF_TOKEN={_SECRET}",
    ],
)
def test_secrets_are_blotted_out_of_texts(text):
    assert _SECRET not in redact(text)
    assert "***" in redact(text)


def test_key_ids_and_secrets_of_the_environment_are_blotted_out(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", _SECRET)
    assert redact(f"denied for {_SECRET} and AKIAABCDEFGHIJKLMNOP.") == "denied for *** and ***."


def test_ordinary_text_is_left_alone():
    text = "tokenizer: gpt2\ntokens_per_s: 100\npad_token: <pad>\nloss=2.5 at step 7 (s3://bucket/key)"
    assert redact(text) == text


def test_fields_are_cleared_at_any_depth():
    fields = {"password": _SECRET, "deep": [{"uri": f"http://a:{_SECRET}@b"}], "step": 3}
    assert redact_fields(fields) == {"password": "***", "deep": [{"uri": "http://***@b"}], "step": 3}

"""The source that `raydz report` names is the one that boto3 takes."""

from __future__ import annotations

import pytest

from raydz.cli.credentials import credentials
from tests.support.seaweed import set_aws_environment

KEYS = "aws_access_key_id = AKIAFILEFILEFILEFILE\naws_secret_access_key = secret-file\n"
ENV_KEYS = {"AWS_ACCESS_KEY_ID": "AKIAENVENVENVENVENVE", "AWS_SECRET_ACCESS_KEY": "secret-env"}
PROGRAM = """credential_process = echo '{"Version": 1, "AccessKeyId": "AKIA", "SecretAccessKey": "s"}'\n"""
# what boto3 calls its sources (`Credentials.method`) -> how our words for it begin
WORDS = {
    "env": "credentials: environment",
    "shared-credentials-file": "credentials: profile {} of the credentials file",
    "config-file": "credentials: profile {} of the config file",
    "custom-process": "credentials: the program that profile {} names",
    None: "no credentials",
}


@pytest.mark.parametrize(
    ("environment", "keys_file", "config_file", "method"),
    [
        ({}, "", "", None),
        (ENV_KEYS, "", "", "env"),
        (ENV_KEYS, f"[default]\n{KEYS}", "", "env"),
        ({**ENV_KEYS, "AWS_PROFILE": "team"}, f"[team]\n{KEYS}", "", "env"),
        ({}, f"[default]\n{KEYS}", "", "shared-credentials-file"),
        ({}, f"[other]\n{KEYS}", "", None),
        ({}, "", f"[default]\n{KEYS}", "config-file"),
        ({}, f"[default]\n{KEYS}", f"[default]\n{KEYS}", "shared-credentials-file"),
        ({"AWS_PROFILE": "team"}, f"[default]\n{KEYS}[team]\n{KEYS}", "", "shared-credentials-file"),
        ({"AWS_PROFILE": "team"}, f"[default]\n{KEYS}", f"[profile team]\n{KEYS}", "config-file"),
        ({"AWS_DEFAULT_PROFILE": "team", "AWS_PROFILE": "x"}, f"[team]\n{KEYS}", "", "shared-credentials-file"),
        ({}, "", f"[default]\n{PROGRAM}{KEYS}", "custom-process"),
        ({}, f"[default]\n{KEYS}", f"[default]\n{PROGRAM}", "shared-credentials-file"),
    ],
)
def test_the_first_source_is_boto3s(tmp_path, monkeypatch, environment, keys_file, config_file, method):
    import botocore.session

    paths = {"AWS_SHARED_CREDENTIALS_FILE": tmp_path / "credentials", "AWS_CONFIG_FILE": tmp_path / "config"}
    for path, text in zip(paths.values(), (keys_file, config_file), strict=True):
        path.write_text(text)
    files = {name: str(path) for name, path in paths.items()}
    everything = {**files, **environment, "AWS_EC2_METADATA_DISABLED": "true"}
    set_aws_environment(monkeypatch, everything)
    theirs = botocore.session.Session().get_credentials()
    assert (theirs and theirs.method) == method
    profile = environment.get("AWS_DEFAULT_PROFILE") or environment.get("AWS_PROFILE") or "default"
    ours = credentials(everything, tmp_path)
    assert ours.detail.startswith(WORDS[method].format(profile))
    assert ours.state == ("odd" if method is None else "ok")
    assert "secret" not in str(ours)
    assert "AKIA" not in str(ours)


def test_the_usual_files_lie_in_the_home_folder(tmp_path):
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws" / "credentials").write_text(f"[default]\n{KEYS}")
    assert "profile default of the credentials file" in credentials({}, tmp_path).detail


@pytest.mark.parametrize(
    ("environment", "state", "said"),
    [
        ({"AWS_ACCESS_KEY_ID": "AKIA1"}, "broken", "AWS_SECRET_ACCESS_KEY is not"),
        ({"AWS_PROFILE": "gone"}, "broken", "profile gone does not exist"),
        ({"AWS_WEB_IDENTITY_TOKEN_FILE": "/t", "AWS_ROLE_ARN": "arn"}, "ok", "web identity"),
        ({"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1/x?token=secret-1"}, "ok", "role of this container"),
        ({}, "absent", "the role of this machine, if it has one"),
    ],
)
def test_what_only_a_cloud_has_is_named_without_asking_it(tmp_path, environment, state, said):
    found = credentials(environment, tmp_path)
    assert found.state == state
    assert said in found.detail
    assert "secret-1" not in str(found)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[default]\nrole_arn = arn\nsource_profile = base\n", "a role that profile default assumes"),
        ("[default]\nsso_start_url = https://x\n", "single sign-on of profile default"),
        ("[default]\nlogin_session = arn\n", "console login of profile default"),
    ],
)
def test_roles_and_sign_on_of_a_profile_are_named(tmp_path, text, said):
    (tmp_path / "config").write_text(text)
    assert said in credentials({"AWS_CONFIG_FILE": str(tmp_path / "config")}, tmp_path).detail


def test_a_broken_file_is_reported_without_its_lines(tmp_path):
    (tmp_path / "credentials").write_text("secret-line without a section\n")
    found = credentials({"AWS_SHARED_CREDENTIALS_FILE": str(tmp_path / "credentials")}, tmp_path)
    assert found.state == "broken"
    assert "secret-line" not in str(found)

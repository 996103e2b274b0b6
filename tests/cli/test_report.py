"""`raydz report` says what is wrong and goes on; it never says a secret."""

from __future__ import annotations

import json
import re

import pytest

from raydz.cli.finding import Finding, guarded
from raydz.cli.report import closing_line
from raydz.errors import StorageError
from tests.cli.conftest import run_raydz
from tests.support import old_store as old

S3_PACKAGES = ("boto3", "botocore", "s3transfer", "awscrt")


@pytest.mark.parametrize(
    ("blocked", "broken"),
    [
        ((), set()),
        (S3_PACKAGES, {"boto3", "awscrt"}),
        (("ray", "mlflow"), {"ray", "mlflow"}),
        (("torch",), {"torch", "native kernels", "torch threads", "torch.distributed", "gpus", "attention"}),
    ],
)
def test_a_missing_package_is_reported_and_the_report_goes_on(blocked, broken):
    result = run_raydz("report", "--json", blocked=blocked)
    assert result.returncode == 0, result.stderr
    findings = json.loads(result.stdout)["findings"]
    assert {f["name"] for f in findings if f["state"] == "broken"} == broken
    assert all(f["remedy"] for f in findings if f["state"] in ("odd", "broken"))
    # a look that fails for want of a package names it
    looks = [f for f in findings if f["name"] in broken - set(blocked)]
    assert all(f"{blocked[0]} is blocked" in f["detail"] for f in looks)
    assert {"raydz", "python", "memory", "shared memory", "ray cluster", "s3"} <= {f["name"] for f in findings}


def test_a_person_reads_one_line_a_thing_and_one_on_how_to_mend_it():
    result = run_raydz("report", blocked=("mlflow",))
    lines = result.stdout.splitlines()
    assert "Traceback" not in result.stderr
    (index,) = [i for i, line in enumerate(lines) if line.startswith("broken")]
    assert "mlflow" in lines[index]
    assert "pip install 'mlflow" in lines[index + 1]
    assert re.fullmatch(r"1 broken, \d+ odd", lines[-1])


SECRETS = {
    "AWS_SECRET_ACCESS_KEY": "secret-1",
    "AWS_SESSION_TOKEN": "secret-2",
    "MLFLOW_TRACKING_PASSWORD": "secret-3",
    "MLFLOW_TRACKING_URI": "http://user:secret-4@127.0.0.1:1",
    "RAY_ADDRESS": "http://user:secret-5@127.0.0.1:1",
    "HF_TOKEN": "secret-6",
    "OMP_NUM_THREADS": "secret-7",
}
ENV_KEY = {"AWS_ACCESS_KEY_ID": "AKIASECRETSECRETSECR"}


@pytest.mark.parametrize(
    ("options", "environment"),
    [
        ((), ENV_KEY),
        ((), {}),
        (("--json",), ENV_KEY),
        (("--s3", "s3://bucket/x"), {**ENV_KEY, "AWS_ENDPOINT_URL": "http://user:secret-8@127.0.0.1:1"}),
        (("--s3", "s3://bucket/x", "--endpoint-url", "http://127.0.0.1:1"), ENV_KEY),
        (("--s3", "s3://bucket/x", "--endpoint-url", "http://127.0.0.1:1"), {}),
    ],
)
def test_no_secret_of_the_environment_is_printed(tmp_path, options, environment):
    (tmp_path / ".aws").mkdir()
    keys = "[default]\naws_access_key_id = AKIAFILEFILEFILEFILE\naws_secret_access_key = secret-9\n"
    (tmp_path / ".aws" / "credentials").write_text(keys)
    # torch is not what this is about, and takes seconds
    result = run_raydz("report", *options, blocked=("torch",), home=tmp_path, **SECRETS, **environment)
    said = result.stdout + result.stderr
    assert "ray cluster" in said
    assert "secret-" not in said
    assert "AKIA" not in said
    assert result.returncode == (1 if "--s3" in options else 0)


@pytest.mark.s3
def test_a_bucket_is_tried_with_an_object_that_is_taken_away_again(s3_env, raydz_command):
    bucket = s3_env.bucket()
    result = raydz_command("report", "--json", "--s3", f"s3://{bucket}/runs", "--endpoint-url", s3_env.endpoint_url)
    assert result.exit_code == 0, result.output
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["name"] == "s3"]
    assert found["state"] == "ok"
    assert f"s3://{bucket}/runs" in found["detail"]
    assert s3_env.client().list_objects_v2(Bucket=bucket)["KeyCount"] == 0


@pytest.mark.s3
def test_a_bucket_that_cannot_be_used_is_a_finding_and_exit_code_1(s3_env, raydz_command):
    result = raydz_command("report", "--json", "--s3", "s3://no-such-bucket/x", "--endpoint-url", s3_env.endpoint_url)
    assert result.exit_code == 1
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["name"] == "s3"]
    assert found["state"] == "broken"
    assert "bucket does not exist" in found["detail"]
    assert found["remedy"]


@pytest.mark.s3
def test_a_weak_store_is_odd_and_can_be_used(s3_env, raydz_command):
    with old.old_store(s3_env.endpoint_url, *old.CHECKSUMS) as proxy:
        result = raydz_command(
            "report", "--json", "--s3", f"s3://{s3_env.bucket()}/x", "--endpoint-url", proxy.endpoint_url
        )
    assert result.exit_code == 0
    (found,) = [f for f in json.loads(result.stdout)["findings"] if f["name"] == "s3"]
    assert found["state"] == "odd" and found["detail"].endswith("does not keep its promise about: checksums")


def test_a_failing_look_becomes_a_finding_and_keeps_what_was_found_before():
    def collect():
        yield Finding("first", "ok", "fine")
        raise OSError("http://user:secret@host")

    first, second = guarded("disk", collect)
    assert first.state == "ok"
    assert (second.name, second.state) == ("disk", "broken")
    assert "OSError" in second.detail
    assert "secret" not in second.detail


def test_a_typed_error_gives_its_own_remedy():
    def collect():
        raise StorageError("the bucket does not exist", where="s3://b", got="NoSuchBucket", remedy="create it")
        yield

    (found,) = guarded("s3", collect)
    assert found == Finding("s3", "broken", "the bucket does not exist (s3://b, NoSuchBucket)", "create it")


def test_what_is_wrong_must_say_how_to_mend_it():
    with pytest.raises(AssertionError):
        Finding("disk", "odd", "full")


@pytest.mark.parametrize(
    ("states", "line"), [(("ok", "absent"), "nothing to mend"), (("broken", "odd", "odd"), "1 broken, 2 odd")]
)
def test_the_last_line_counts(states, line):
    findings = [Finding("x", state, "", "do" if state in ("odd", "broken") else None) for state in states]
    assert closing_line(findings) == line

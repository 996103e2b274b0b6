"""A run through Ray whose checkpoints live on a real S3 server, continued by another number of workers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.support.runs import losses, small_config, start_driver

pytestmark = [pytest.mark.ray, pytest.mark.s3]


def test_a_run_on_s3_continues_with_fewer_workers(ray_cluster, s3_server, tmp_path: Path) -> None:
    bucket = s3_server.bucket()
    sections = {
        "checkpoint": {"dir": f"s3://{bucket}/runs", "every": 5},
        "storage": {"endpoint_url": s3_server.endpoint_url, "region": "us-east-1"},
    }
    ray_cluster.give_credentials(s3_server.env["AWS_ACCESS_KEY_ID"], s3_server.env["AWS_SECRET_ACCESS_KEY"])

    def fit(name: str, steps: int, workers: int, folder: str) -> dict:
        config = small_config(tmp_path, name, train={"steps": steps}, scaling={"num_workers": workers}, **sections)
        process = start_driver({"config": config}, tmp_path / folder, ray_cluster.env)
        code = process.wait(timeout=240)
        assert code == 0, (tmp_path / folder / "driver.log").read_text()[-4000:]
        return json.loads((tmp_path / folder / "result.json").read_text())

    first = fit("resized", 10, 2, "first")
    assert first["checkpoint_uri"] == f"s3://{bucket}/runs/resized/checkpoints/step-0000000010"
    second = fit("resized", 15, 1, "second")
    assert second["step"] == 15 and second["checkpoint_uri"].endswith("step-0000000015")
    again = fit("resized", 15, 1, "again")
    assert again["status"] == "complete" and again["checkpoint_uri"] == second["checkpoint_uri"]

    fit("straight", 15, 2, "straight")
    resized, straight = losses(tmp_path, "resized"), losses(tmp_path, "straight")
    assert list(resized) == list(straight) == list(range(1, 16))
    np.testing.assert_allclose(list(resized.values()), list(straight.values()), rtol=0, atol=1e-5)

    keys = [entry["Key"] for entry in s3_server.client().list_objects_v2(Bucket=bucket)["Contents"]]
    assert sum(key.endswith("manifest.json") for key in keys if "/resized/" in key) == 3
    assert s3_server.env["AWS_SECRET_ACCESS_KEY"] not in "".join(
        path.read_text(errors="replace") for path in tmp_path.rglob("*.json*") if path.is_file()
    )

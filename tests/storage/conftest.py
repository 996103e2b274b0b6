"""Stores under test: each contract test runs on every one of them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from raydz.storage import S3Options, Store, open_store
from tests.support.seaweed import SeaweedServer, set_aws_environment

MIB = 1 << 20

SMALL_PARTS = {"part_bytes_min": 5 * MIB, "part_bytes_max": 5 * MIB}


@pytest.fixture(
    params=[
        "local",
        pytest.param("s3_server", marks=pytest.mark.s3),
        pytest.param("s3_server_https", marks=pytest.mark.s3),
    ]
)
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store; parts of uploads are as small as S3 allows."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    server: SeaweedServer = request.getfixturevalue(request.param)
    set_aws_environment(monkeypatch, server.env)
    options = S3Options(endpoint_url=server.endpoint_url, **SMALL_PARTS)
    return open_store(f"s3://{server.shared_bucket}/runs/{uuid.uuid4().hex[:8]}", options)

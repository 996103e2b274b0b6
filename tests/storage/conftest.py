"""Stores under test: each contract test runs on every one of them."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from raydz.storage import S3Options, Store, open_store
from tests.support.seaweed import set_aws_environment

MIB = 1 << 20

SMALL_PARTS = {"part_bytes_min": 5 * MIB, "part_bytes_max": 5 * MIB}


@pytest.fixture(params=["local", "s3", "s3-crc64nvme", "s3-https", "s3-https-crc32c", "s3-off"])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    """An empty store; parts of uploads are as small as S3 allows."""
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    server = request.getfixturevalue("s3_server_https" if "https" in request.param else "s3_server")
    set_aws_environment(monkeypatch, server.env)
    checksum = {"crc64nvme": "crc64nvme", "crc32c": "crc32c", "off": "off"}.get(request.param.split("-")[-1], "auto")
    options = S3Options(endpoint_url=server.endpoint_url, checksum=checksum, **SMALL_PARTS)
    return open_store(f"s3://{server.bucket()}/runs/{uuid.uuid4().hex[:8]}", options)

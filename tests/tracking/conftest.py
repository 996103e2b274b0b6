"""A sink that can fail or block on demand, and a real MLflow server that can be killed."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest


class RecordingSink:
    """Keeps what it is given, by step. `down`: every call raises. `gate`: every call waits until it is set."""

    def __init__(self, held_step: int = -1) -> None:
        self.held_step = held_step
        self.points: list = []
        self.tags: dict[str, str] = {}
        self.texts: dict[str, str] = {}
        self.endings: list = []
        self.calls = 0
        self.down = False
        self.texts_down = False
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def _call(self) -> None:
        self.calls += 1
        self.entered.set()
        self.gate.wait()
        if self.down:
            raise ConnectionError("server is down: http://user:hunter2secret@host/")

    def connect(self) -> int:
        self._call()
        return self.held_step

    def publish(self, points) -> None:
        self._call()
        self.points.extend(points)

    def set_tags(self, tags) -> None:
        self._call()
        self.tags.update(tags)

    def log_text(self, name, text) -> None:
        self._call()
        if self.texts_down:
            raise ConnectionError("no bucket")
        self.texts[name] = text

    def finish(self, status, error) -> None:
        self._call()
        self.endings.append((status, error))

    @property
    def steps(self) -> list[int]:
        return [point.step for point in self.points]


@pytest.fixture
def sink() -> RecordingSink:
    return RecordingSink()


class MlflowServer:
    """`mlflow server` on a free port over a sqlite file; `kill` and `start` again keep port and file."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._process: subprocess.Popen | None = None

    def start(self) -> None:
        env = os.environ | {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
        command = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(self.port)]
        command += ["--workers", "1", "--backend-store-uri", f"sqlite:///{self.folder}/server.db"]
        command += ["--artifacts-destination", str(self.folder / "artifacts")]
        with (self.folder / "server.log").open("ab") as out:
            self._process = subprocess.Popen(
                command, env=env, cwd=self.folder, stdout=out, stderr=out, start_new_session=True
            )
        deadline = time.monotonic() + 90
        while not self._is_up():
            assert time.monotonic() < deadline, (self.folder / "server.log").read_text()[-2000:]
            time.sleep(0.2)

    def kill(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)  # a session of its own: its children go with it
            self._process.wait()
            self._process = None

    def _is_up(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.uri}/health", timeout=1) as reply:
                return reply.status == 200
        except (urllib.error.URLError, OSError):
            return False


@pytest.fixture(scope="session")
def mlflow_server(tmp_path_factory):
    server = MlflowServer(tmp_path_factory.mktemp("mlflow_server"))
    server.start()
    yield server
    server.kill()

"""Notices of a host's end, from servers that answer as the clouds' metadata services do, and from a file."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from raydz.config import load
from raydz.errors import ConfigError
from raydz.orchestrate import notices
from raydz.orchestrate.notices import AwsNotices, FileNotices, GoogleNotices, Notice, NoticeWatch, sources_of


class Metadata:
    """What a metadata service knows, and what it was asked."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.tokens: list[str] = []
        self.refuses_tokens = False
        self.is_broken = False
        self.asked: list[str] = []


@contextmanager
def serving(answer) -> Iterator[tuple[str, Metadata]]:
    state = Metadata()

    class Handler(BaseHTTPRequestHandler):
        def handle_all(self) -> None:
            state.asked.append(f"{self.command} {self.path}")
            code, body = (503, "") if state.is_broken else answer(state, self.command, self.path, self.headers)
            self.send_response(code)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body.encode())

        do_GET = do_PUT = handle_all

        def log_message(self, *arguments) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", state
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def as_aws(state: Metadata, method: str, path: str, headers) -> tuple[int, str]:
    """IMDSv2: a session token by PUT, without which nothing is told; 404 where there is nothing."""
    if path == "/latest/api/token":
        if method != "PUT" or not headers.get("X-aws-ec2-metadata-token-ttl-seconds"):
            return 400, ""
        state.tokens.append(f"token-{len(state.tokens)}")
        return 200, state.tokens[-1]
    if state.refuses_tokens or headers.get("X-aws-ec2-metadata-token") not in state.tokens[-1:]:
        return 401, ""
    value = state.values.get(path)
    return (404, "") if value is None else (200, value)


def as_google(state: Metadata, method: str, path: str, headers) -> tuple[int, str]:
    if headers.get("Metadata-Flavor") != "Google":
        return 403, ""
    value = state.values.get(path.rpartition("/")[2])
    return (404, "") if value is None else (200, value)


@pytest.fixture
def aws():
    with serving(as_aws) as (address, state):
        yield AwsNotices(address), state


@pytest.fixture
def google():
    with serving(as_google) as (address, state):
        state.values = {"preempted": "FALSE", "maintenance-event": "NONE"}
        yield GoogleNotices(address), state


ACTION = "/latest/meta-data/spot/instance-action"


def test_aws_says_when_a_spot_instance_goes(aws, monkeypatch):
    source, state = aws
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    assert source.is_here() and source.look() is None
    at = (datetime.now(timezone.utc) + timedelta(seconds=110)).strftime("%Y-%m-%dT%H:%M:%SZ")
    state.values[ACTION] = f'{{"action": "terminate", "time": "{at}"}}'
    notice = source.look()
    assert notice is not None and notice.reason == f"AWS says terminate at {at}"
    assert notice.left_s == pytest.approx(110, abs=3)
    assert len(state.tokens) == 1, "a token is asked for once in hours, not with every look"


def test_a_token_that_aws_no_longer_takes_is_renewed(aws):
    source, state = aws
    assert source.look() is None
    state.tokens.append("of another host")
    state.values[ACTION] = '{"action": "stop", "time": "soon"}'
    assert source.look() is None
    assert source.look() == Notice("AWS says stop at soon", None)


def test_aws_is_not_asked_where_its_metadata_are_switched_off(aws, monkeypatch):
    source, state = aws
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    assert not source.is_here() and state.asked == []


def test_google_says_preempted_or_terminates_for_maintenance(google):
    source, state = google
    assert source.is_here() and source.look() is None
    state.values["maintenance-event"] = "MIGRATE_ON_HOST_MAINTENANCE"
    assert source.look() is None, "the host is moved alive"
    state.values["maintenance-event"] = "TERMINATE_ON_HOST_MAINTENANCE"
    assert source.look() == Notice("Google ends this host for maintenance", 60.0)
    state.values["preempted"] = "TRUE"
    assert source.look() == Notice("Google preempts this host", 30.0)


def test_another_service_is_not_taken_for_one_of_them(aws, google, monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    here = {source.name: source.is_here() for source in (
        AwsNotices(google[0]._instance.removesuffix("/computeMetadata/v1/instance")), GoogleNotices(aws[0]._address),
        AwsNotices("http://127.0.0.1:1"), GoogleNotices("http://127.0.0.1:1"))}  # fmt: skip
    assert not any(here.values())


def test_a_file_is_a_notice_once_it_appears(tmp_path):
    source = FileNotices(str(tmp_path / "notice"))
    assert source.look() is None
    (tmp_path / "notice").write_text("rack 7 is moved\nat noon")
    assert source.look() == Notice("rack 7 is moved", None)
    (tmp_path / "notice").write_text("")
    assert source.look() == Notice(f"{tmp_path / 'notice'} is there", None)


def wait_until(condition, limit_s: float = 5.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_notice_is_told_once_and_after_a_refusal_again(google, monkeypatch):
    monkeypatch.setattr(notices, "_POLL_S", 0.02)
    source, state = google
    told: list[Notice] = []

    def tell(notice: Notice) -> None:
        told.append(notice)
        if len(told) == 1:
            raise RuntimeError("the head does not answer")

    with NoticeWatch([source], tell) as watch:
        wait_until(lambda: len(state.asked) > 4)
        assert told == []
        state.is_broken = True
        time.sleep(0.1)
        state.is_broken = False
        state.values["preempted"] = "TRUE"
        wait_until(lambda: not watch._thread.is_alive())
    assert told == [Notice("Google preempts this host", 30.0)] * 2


def test_a_host_outside_the_clouds_is_asked_once(monkeypatch):
    monkeypatch.delenv("AWS_EC2_METADATA_DISABLED", raising=False)
    with NoticeWatch([AwsNotices("http://127.0.0.1:1"), GoogleNotices("http://127.0.0.1:1")], print) as watch:
        wait_until(lambda: not watch._thread.is_alive())


def test_the_configuration_names_the_sources():
    def names(**failure) -> list[str]:
        return [source.name for source in sources_of(load({"failure": failure}).failure)]

    assert names() == ["aws", "google"] and names(preemption_notices=[]) == []
    assert names(preemption_notices=["google"], notice_file="/run/going") == ["google", "file"]
    with pytest.raises(ConfigError, match="preemption_notices"):
        load({"failure": {"preemption_notices": ["azure"]}})

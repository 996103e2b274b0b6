"""Job servers that refuse or are not there: what a person is told. A small HTTP server stands for the dashboard."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from raydz.config import load
from raydz.errors import ConfigError, PlacementError
from raydz.orchestrate.job_client import JobServerAway, JobUnknown, ask, connect_to_jobs
from raydz.orchestrate.naming import named_by_submission


@contextmanager
def dashboard(status: int) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(b"no")

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.mark.parametrize(
    ("status", "mode", "got", "remedy"),
    [
        (401, "disabled", "no token was sent", "export RAY_AUTH_MODE=token"),
        (401, "token", "no token was found here", "RAY_AUTH_TOKEN_PATH"),
        (403, "token", "is not the cluster's", "auth_token"),
    ],
)
def test_a_cluster_that_wants_a_token_says_what_to_set(monkeypatch, status, mode, got, remedy):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
    with dashboard(status) as url, pytest.raises(PlacementError, match="wants a token") as caught:
        connect_to_jobs(url)
    assert got in caught.value.got and remedy in caught.value.remedy and caught.value.where == url


def test_another_program_at_the_address_is_named():
    with dashboard(404) as url, pytest.raises(PlacementError, match="no job server") as caught:
        connect_to_jobs(url)
    assert "http://host:8265" in caught.value.remedy and caught.value.where == url


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (RuntimeError("Request failed with status code 404: Job x does not exist."), JobUnknown),
        (RuntimeError("Request failed with status code 500: No available agent"), JobServerAway),
        (ConnectionError("refused"), JobServerAway),
        (RuntimeError("Request failed with status code 400: bad runtime_env"), PlacementError),
    ],
)
def test_answers_are_told_apart(answer, kind):
    def call():
        raise answer

    with pytest.raises(kind):
        ask(call, "somewhere")


def test_the_submissions_name_is_the_runs_where_the_configuration_has_none(monkeypatch):
    monkeypatch.delenv("RAYDZ_RUN_NAME", raising=False)
    unnamed = load({"train": {"steps": 3}})
    assert named_by_submission(unnamed) is unnamed
    monkeypatch.setenv("RAYDZ_RUN_NAME", "1e5")
    named = named_by_submission(unnamed)
    assert (named.run.name, named.train.steps) == ("1e5", 3)
    assert named_by_submission(load({"run": {"name": "1e5"}})).run.name == "1e5"
    with pytest.raises(ConfigError, match="two names"):
        named_by_submission(load({"run": {"name": "other"}}))

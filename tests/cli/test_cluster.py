"""A Ray cluster is looked for where `ray job submit` looks; the answer of a real HTTP server is judged."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from raydz.cli.cluster import Place, ask_dashboard, ask_port, judge, place_of, ray_cluster
from tests.support.seaweed import free_ports


@pytest.fixture
def answering():
    """Start an HTTP server that gives one answer (status, body); returns its port."""
    servers = []

    def start(status: int, body: str) -> int:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(body.encode())

            def log_message(self, *_):
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        servers.append(server)
        return server.server_port

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def local(port: int, source: str | None = "RAY_ADDRESS") -> Place:
    return Place(source, "127.0.0.1", port, True, f"http://127.0.0.1:{port}")


@pytest.mark.parametrize(
    ("environment", "source", "shown", "is_dashboard"),
    [
        ({}, None, "http://127.0.0.1:8265", True),
        ({"RAY_ADDRESS": "auto"}, None, "http://127.0.0.1:8265", True),
        ({"RAY_ADDRESS": "http://head:8265"}, "RAY_ADDRESS", "http://head:8265", True),
        ({"RAY_ADDRESS": "https://u:secret@head"}, "RAY_ADDRESS", "https://head:443", True),
        ({"RAY_ADDRESS": "10.0.0.1:6379"}, "RAY_ADDRESS", "10.0.0.1:6379", False),
        ({"RAY_ADDRESS": "ray://head"}, "RAY_ADDRESS", "ray://head:10001", False),
        (
            {"RAY_ADDRESS": "10.0.0.1:6379", "RAY_API_SERVER_ADDRESS": "http://head:1"},
            "RAY_API_SERVER_ADDRESS",
            "http://head:1",
            True,
        ),
    ],
)
def test_the_place_is_where_ray_looks_and_shows_no_password(environment, source, shown, is_dashboard):
    place = place_of(environment)
    assert (place.source, place.shown, place.is_dashboard) == (source, shown, is_dashboard)


@pytest.mark.parametrize("address", ["http://", "http://head:secret/", "head:port:more"])
def test_an_address_that_cannot_be_read_is_broken_and_not_repeated(address):
    (found,) = ray_cluster({"RAY_ADDRESS": address})
    assert found.state == "broken"
    assert "secret" not in str(found)


@pytest.mark.parametrize(
    ("status", "body", "answer"),
    [
        (200, json.dumps({"version": "4", "ray_version": "2.60.0"}), "2.60.0"),
        (401, "", "locked"),
        (404, "", "other"),
        (200, "<html>", "other"),
        (200, "[]", "other"),
        (200, "{}", "other"),
    ],
)
def test_what_answers_is_told_apart(answering, status, body, answer):
    assert ask_dashboard(local(answering(status, body))) == answer


def test_a_proxy_is_not_asked_about_this_machine(answering, monkeypatch):
    (closed,) = free_ports(1)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{answering(200, json.dumps({'ray_version': '1'}))}")
    assert ask_dashboard(local(closed)) is None


def test_a_port_of_rays_own_protocol_is_only_knocked_at(answering):
    (closed,) = free_ports(1)
    assert ask_port(local(answering(200, ""))) == "open"
    assert ask_port(local(closed)) is None


@pytest.mark.parametrize(
    ("source", "answer", "state"),
    [
        (None, None, "absent"),
        ("RAY_ADDRESS", None, "broken"),
        (None, "2.60.0", "ok"),
        (None, "2.59.0", "broken"),
        (None, "locked", "odd"),
        (None, "other", "odd"),
        ("RAY_ADDRESS", "open", "ok"),
    ],
)
def test_a_cluster_must_answer_if_it_was_named_and_run_our_version(source, answer, state):
    assert judge(local(1, source), answer, "2.60.0").state == state

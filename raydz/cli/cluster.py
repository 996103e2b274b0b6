"""Whether a Ray cluster answers where this machine's settings point to, and whether it runs our version.

Neighbours: `report.py` asks. Ray itself is not imported: its dashboard is asked over HTTP, as `ray job submit` does.
"""

from __future__ import annotations

import importlib.metadata
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from raydz.cli.finding import Finding

LIMIT_S = 2.0
_DASHBOARD = "http://127.0.0.1:8265"


@dataclass(frozen=True)
class Place:
    """Where a cluster should be.

    Args:
        source: name of the variable that says so, or None for Ray's default.
        is_dashboard: it speaks HTTP there; else it is a port of Ray's own protocol.
        shown: scheme, host and port alone, without a user's name or password.
    """

    source: str | None
    host: str
    port: int
    is_dashboard: bool
    shown: str


def place_of(environment: Mapping[str, str]) -> Place | None:
    """Where `ray job submit` and `ray.init` would look, or None for an address that cannot be read."""
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):
        value = environment.get(name, "")
        if value and value not in ("auto", "local"):
            return _parse(name, value)
    return _parse(None, _DASHBOARD)


def _parse(source: str | None, address: str) -> Place | None:
    parts = urlsplit(address if "://" in address else f"gcs://{address}")
    is_dashboard = parts.scheme in ("http", "https")
    default = {"http": 80, "https": 443, "ray": 10001}.get(parts.scheme, 6379)
    try:
        host, port = parts.hostname, parts.port or default
    except ValueError:  # not a number
        return None
    if not host:
        return None
    shown = f"{host}:{port}" if parts.scheme == "gcs" else f"{parts.scheme}://{host}:{port}"
    return Place(source, host, port, is_dashboard, shown)


def ray_cluster(environment: Mapping[str, str]) -> Iterator[Finding]:
    """The cluster that jobs would go to."""
    place = place_of(environment)
    if place is None:
        remedy = "write http://host:8265 (dashboard), host:6379, or nothing"
        yield Finding("ray cluster", "broken", "the address in RAY_ADDRESS cannot be read", remedy)
        return
    answer = ask_dashboard(place) if place.is_dashboard else ask_port(place)
    yield judge(place, answer, _own_version())


def ask_dashboard(place: Place) -> str | None:
    """Ray's version there, `locked` where it wants a token, `other` for another program, None if nothing answers."""
    # A proxy of the environment is for the world outside; it would answer for a loopback address.
    is_local = place.host in ("127.0.0.1", "localhost", "::1")
    opener = urllib.request.build_opener(*[urllib.request.ProxyHandler({})] * is_local)
    try:
        with opener.open(f"{place.shown}/api/version", timeout=LIMIT_S) as response:
            return str(json.load(response)["ray_version"])
    except urllib.error.HTTPError as error:
        return "locked" if error.code in (401, 403) else "other"
    except (ValueError, KeyError, TypeError):
        return "other"
    except OSError:
        return None


def ask_port(place: Place) -> str | None:
    """`open` if something listens there; its version cannot be asked without joining."""
    try:
        with socket.create_connection((place.host, place.port), timeout=LIMIT_S):
            return "open"
    except OSError:
        return None


def judge(place: Place, answer: str | None, own: str | None) -> Finding:
    """A cluster that was named must answer, and must run the version that is installed here."""
    if answer is None and place.source is None:
        detail = f"none at {place.shown}: raydz.fit starts a local one"
        return Finding("ray cluster", "absent", detail)
    if answer is None:
        remedy = f"start the cluster, correct {place.source}, or unset it"
        return Finding("ray cluster", "broken", f"nothing answers at {place.shown} ({place.source})", remedy)
    if answer == "other":
        remedy = "set RAY_ADDRESS to the dashboard of your cluster"
        return Finding("ray cluster", "odd", f"another program answers at {place.shown}", remedy)
    if answer == "locked":
        remedy = "give the cluster's token, and the same RAY_AUTH_MODE as there"
        return Finding("ray cluster", "odd", f"wants a token at {place.shown}", remedy)
    if answer == "open":
        return Finding("ray cluster", "ok", f"something listens at {place.shown}")
    if own is not None and answer != own:
        detail = f"Ray {answer} at {place.shown}, but {own} is installed here"
        return Finding("ray cluster", "broken", detail, f"pip install ray=={answer}, or the other way round")
    return Finding("ray cluster", "ok", f"Ray {answer} at {place.shown}")


def _own_version() -> str | None:
    try:
        return importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        return None

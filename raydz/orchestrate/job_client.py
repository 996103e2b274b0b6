"""A connection to a cluster's job server whose every answer is bounded in time and every refusal has a remedy.

Neighbours: `submit.py` submits through it, `job_follow.py` asks and follows.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

from raydz import log
from raydz.errors import PlacementError

_logger = log.get(__name__)
T = TypeVar("T")

_ANSWER_S = 30.0
_UPLOAD_S = 300.0
_RETRY_S = 2.0
_ADDRESS = "RAY_API_SERVER_ADDRESS"


class JobUnknown(Exception):
    """The cluster answers, and knows of no such job: its head has started anew."""


class JobServerAway(Exception):
    """No answer, or one that says that the server is not ready."""


class JobClient(JobSubmissionClient):
    """Ray's client with a time limit on every request; Ray's own waits for ever."""

    def _do_request(self, method: str, endpoint: str, **options: Any) -> requests.Response:
        options.setdefault("timeout", _UPLOAD_S if method == "PUT" else _ANSWER_S)
        return super()._do_request(method, endpoint, **options)


def connect_to_jobs(address: str | None) -> JobClient:
    """Open the job server of the cluster at `address`, $RAY_API_SERVER_ADDRESS, $RAY_ADDRESS, or of this machine.

    Raises:
        PlacementError: nothing answers there, or it does not let us in.
    """
    where = address or os.environ.get(_ADDRESS) or os.environ.get("RAY_ADDRESS") or "this machine"
    try:
        with _address(address):
            return JobClient(None)
    except AuthenticationError as error:
        raise locked_out(where, error) from None
    except (OSError, ValueError, RuntimeError, requests.RequestException) as error:
        raise PlacementError(
            "no job server of a Ray cluster answers", where=where, got=_first_line(error),
            remedy="give the dashboard's address, --address http://host:8265, and through a firewall an SSH tunnel "
            "to it: ssh -L 8265:127.0.0.1:8265 host",
        ) from None  # fmt: skip


@contextmanager
def _address(given: str | None) -> Iterator[None]:
    """Ray's client lets two variables win over its argument; an address on the command line must win over both."""
    if given is None:
        yield
        return
    before = os.environ.get(_ADDRESS)
    os.environ[_ADDRESS] = given
    try:
        yield
    finally:
        if before is None:
            del os.environ[_ADDRESS]
        else:
            os.environ[_ADDRESS] = before


def locked_out(where: str, error: AuthenticationError) -> PlacementError:
    """The same refusal in words that say what to set, by what we sent."""
    sends_token = os.environ.get("RAY_AUTH_MODE", "").lower() == "token"
    if not sends_token:
        got, remedy = "RAY_AUTH_MODE is not `token` here, so no token was sent", "export RAY_AUTH_MODE=token"
        remedy += " and the cluster's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file ~/.ray/auth_token"
    elif "Authentication required" in error.message:
        got = "RAY_AUTH_MODE is `token`, but no token was found here"
        remedy = "give the cluster's token: RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or the file ~/.ray/auth_token"
    else:
        got = "the token that was sent is not the cluster's"
        remedy = "copy the head node's ~/.ray/auth_token here, or set RAY_AUTH_TOKEN; RAY_AUTH_TOKEN counts first"
    return PlacementError("the cluster wants a token", where=where, got=got, remedy=remedy)


def ask(call: Callable[[], T], where: str) -> T:
    """Make one request and tell apart what can go wrong with it.

    Raises:
        JobUnknown: the job is not there.
        JobServerAway: a try later may succeed.
        PlacementError: it will not.
    """
    try:
        return call()
    except AuthenticationError as error:
        raise locked_out(where, error) from None
    except (requests.RequestException, OSError) as error:
        raise JobServerAway(_first_line(error)) from error
    except RuntimeError as error:
        text = str(error)
        if "status code 404" in text:
            raise JobUnknown(_first_line(error)) from error
        if "status code 5" in text:
            raise JobServerAway(_first_line(error)) from error
        raise PlacementError("the job server refuses", where=where, got=_first_line(error)) from error


def insist(call: Callable[[], T], where: str, patience_s: float) -> T:
    """`ask` until there is an answer, for at most `patience_s`.

    Blocking: that long. Raises: as `ask`.
    """
    deadline, is_first = time.monotonic() + patience_s, True
    while True:
        try:
            return ask(call, where)
        except JobServerAway as error:
            if time.monotonic() + _RETRY_S > deadline:
                raise
            if is_first:
                _logger.warning("%s does not answer (%s); asking for %g s", where, error, patience_s)
                is_first = False
            time.sleep(_RETRY_S)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__

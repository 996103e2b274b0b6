"""Keeps secrets out of telemetry: refuses them in URIs, blots them out of texts.

Layer 3. `tracking.tracker` calls `refuse_credentials` before a URI goes anywhere and `redact` on every text that is
written to events, tags or artifacts.
"""

from __future__ import annotations

import os
import re
from typing import Any
from urllib.parse import parse_qsl

from raydz.errors import ConfigError

_MARK = "***"
_SECRET_WORDS = r"passw(?:or)?d|secret(?:[_-]?access)?(?:[_-]?key)?|api[_-]?key|access[_-]?key(?:[_-]?id)?|credentials?"
_TOKEN_WORDS = r"(?:auth|access|session|security|refresh|bearer|hf|api|tracking)[_-]?token|authorization|signature"
_SECRET_NAME = rf"(?:{_SECRET_WORDS}|{_TOKEN_WORDS})"
_ASSIGNED = re.compile(rf"(?i)({_SECRET_NAME}[\"']?\s*[=:]\s*[\"']?)(?:(?:bearer|basic)\s+)?[^\s\"',;&}})]+")
_USERINFO = re.compile(r"([A-Za-z][\w+.-]*://)[^\s@]+@")
_AWS_KEY_ID = re.compile(r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b")
_FILE_SCHEMES = ("", "file", "sqlite")
_SHORTEST_SECRET = 8  # a shorter value of the environment would blot out ordinary words


def refuse_credentials(uri: str, where: str = "tracking.mlflow_uri") -> None:
    """Accept a URI only without a user, password or token in it. The URI itself is never printed.

    Raises:
        ConfigError: it holds credentials.
    """
    scheme, _, rest = uri.partition("://") if "://" in uri else ("", "", uri)
    if scheme.split("+")[0] in _FILE_SCHEMES:
        return
    # Not urlsplit().password: a password with a slash or a hash in it would pass as a path.
    in_front = "@" in rest if scheme.startswith("http") else re.search(r"^[^@]*:[^@]*@", rest)
    keys = [key for key, _ in parse_qsl(rest.partition("?")[2])]
    if not in_front and not any(re.search(rf"(?i){_SECRET_NAME}|token", key) for key in keys):
        return
    raise ConfigError(
        "the tracking URI holds credentials",
        where=where,
        got=f"{scheme}://{_MARK}",
        wanted=f"{scheme}://host[:port]",
        remedy="put them in the environment as MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD "
        "(or MLFLOW_TRACKING_TOKEN)",
    )


def redact(text: str) -> str:
    """The text without credentials: users in URIs, `password=...` and its kin, AWS keys, secrets of the environment."""
    for value in _secrets_of_environment():
        text = text.replace(value, _MARK)
    text = _USERINFO.sub(rf"\1{_MARK}@", text)
    text = _ASSIGNED.sub(rf"\1{_MARK}", text)
    return _AWS_KEY_ID.sub(_MARK, text)


def _secrets_of_environment() -> list[str]:
    named = (value for name, value in os.environ.items() if re.search(rf"(?i){_SECRET_NAME}|token$", name))
    return sorted((value for value in named if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def redact_fields(value: Any) -> Any:
    """A JSON value with `redact` on every text in it; what stands under a secret's name goes whole."""
    if isinstance(value, dict):
        return {
            k: _MARK if re.fullmatch(rf"(?i).*{_SECRET_NAME}", str(k)) else redact_fields(v) for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [redact_fields(item) for item in value]
    return redact(value) if isinstance(value, str) else value


def first_line(error: Exception) -> str:
    """An error in one line, without secrets, for the log."""
    lines = redact(str(error)).splitlines() or [""]
    return f"{type(error).__name__}: {lines[0][:300]}"

"""No literal credential may stand in a configuration: found by key and by shape, named by path, never printed.

Layer 1. `load` scans files and overrides before anything else looks at the values, so that no later message,
log line, MLflow parameter or checkpoint can carry one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

from raydz.config.faults import Fault

_WORDS = {"secret", "secrets", "password", "passwd", "passphrase", "token", "credential", "credentials", "apikey"}
_WORD_PAIRS = {("access", "key"), ("api", "key"), ("private", "key"), ("secret", "key"), ("account", "key")}
_SHAPES = re.compile(
    r"""
      \b(?:AKIA|ASIA)[0-9A-Z]{16}\b                                     # AWS access key id
    | ://[^/\s:@]*:(?!\d+(?:/|$))[^\s@]*@                               # scheme://user:password@host
    | (?i:[?&;](?:x-amz-)?(?:access_?key(?:_?id)?|secret(?:_?(?:access_?)?key)?|password|passwd|token|security-token
        |signature|sig|credential|api_?key)=[^&\s])                     # ...?token=abc
    | -----BEGIN[ ][A-Z ]*PRIVATE[ ]KEY
    | \b(?:hf_|gh[pousr]_|github_pat_|xox[abp]-|sk-)[A-Za-z0-9_-]{16,}  # tokens of well-known services
    """,
    re.VERBOSE,
)
_REMEDY = (
    "remove it and revoke it if the file was shared; give credentials by the environment (AWS_PROFILE, "
    "AWS_ACCESS_KEY_ID, MLFLOW_TRACKING_USERNAME, ...) or an instance role"
)


def find_secrets(value: Any, path: tuple[str, ...] = ()) -> Iterator[Fault]:
    """A fault for each literal credential inside `value`, without the credential."""
    if path and _is_secret_name(path[-1]) and value not in (None, "", [], {}) and not isinstance(value, bool):
        yield _fault(path)
    elif isinstance(value, Mapping):
        for key, below in value.items():
            yield from find_secrets(below, (*path, str(key)))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, below in enumerate(value):
            yield from find_secrets(below, (*path, str(index)))
    elif isinstance(value, str) and _SHAPES.search(value):
        yield _fault(path)
    if path and _SHAPES.search(path[-1]):
        yield _fault(path)


def looks_secret(text: str) -> bool:
    """Whether `text` has the shape of a credential; ask before quoting anything that was not scanned."""
    return bool(_SHAPES.search(text))


def _is_secret_name(name: str) -> bool:
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+", name)
    lowered = [word.lower() for word in words]
    return not _WORDS.isdisjoint(lowered) or not _WORD_PAIRS.isdisjoint(pairwise(lowered))


def _fault(path: tuple[str, ...]) -> Fault:
    shown = ".".join("<hidden>" if looks_secret(part) else part for part in path)
    return Fault(shown or "<value>", "a literal credential in the configuration", got="(not shown)", remedy=_REMEDY)

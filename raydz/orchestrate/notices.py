"""Word that this host will be taken away: spot and maintenance notices of AWS and Google, or a file that appears.

Neighbours: `worker.py` keeps a `NoticeWatch` on one rank of each node; `drain.py` does what follows. Free of ray and
torch. See README.md, "A notice".
"""

from __future__ import annotations

import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Protocol

from raydz import log
from raydz.config.cluster import FailureConfig

_POLL_S = 2.0
_ANSWER_S = 2.0
_TOKEN_S = 21600
_GOOGLE_PREEMPTION_S = 30.0
_GOOGLE_MAINTENANCE_S = 60.0
_logger = log.get(__name__)


@dataclass(frozen=True)
class Notice:
    """What was said.

    Args:
        left_s: time until the host goes; None: nobody said.
    """

    reason: str
    left_s: float | None = None


class Source(Protocol):
    """One place where a notice may appear."""

    name: str

    def is_here(self) -> bool:
        """Whether this host has such a place. Blocking: for one answer."""
        ...

    def look(self) -> Notice | None:
        """The notice, once there is one. Blocking: for an answer or two. Raises: OSError: no answer."""
        ...


class AwsNotices:
    """The instance metadata service, version 2: `spot/instance-action`.

    Source: AWS, "Spot Instance interruption notices"; the path answers 404 until there is one, about two minutes ahead.
    """

    name = "aws"

    def __init__(self, address: str = "http://169.254.169.254") -> None:
        self._address = address
        self._token = ""
        self._token_until = 0.0

    def is_here(self) -> bool:
        """See `Source.is_here`; AWS_EC2_METADATA_DISABLED is obeyed, as boto3 does."""
        if os.environ.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
            return False
        try:
            return bool(self._fresh_token())
        except OSError:
            return False

    def look(self) -> Notice | None:
        """See `Source.look`."""
        headers = {"X-aws-ec2-metadata-token": self._fresh_token()}
        try:
            body = _fetch(f"{self._address}/latest/meta-data/spot/instance-action", headers)
        except urllib.error.HTTPError as error:
            if error.code == 401:  # a token of before the host was moved
                self._token_until = 0.0
            if error.code in (401, 404):
                return None
            raise
        return _aws_notice(body, time.time())

    def _fresh_token(self) -> str:
        if time.monotonic() >= self._token_until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TOKEN_S)}
            self._token = _fetch(f"{self._address}/latest/api/token", headers, method="PUT")
            self._token_until = time.monotonic() + _TOKEN_S / 2
        return self._token


class GoogleNotices:
    """The metadata server of Compute Engine: `preempted`, half a minute ahead, and `maintenance-event`.

    Source: Google Cloud, "Preemptible VM instances" and "Query metadata server for maintenance event notices".
    """

    name = "google"

    def __init__(self, address: str = "http://metadata.google.internal") -> None:
        self._instance = f"{address}/computeMetadata/v1/instance"

    def is_here(self) -> bool:
        """See `Source.is_here`."""
        try:
            self._read("preempted")
        except OSError:
            return False
        return True

    def look(self) -> Notice | None:
        """See `Source.look`; a maintenance through which the host is moved alive is none."""
        if self._read("preempted") == "TRUE":
            return Notice("Google preempts this host", _GOOGLE_PREEMPTION_S)
        if self._read("maintenance-event").startswith("TERMINATE"):
            return Notice("Google ends this host for maintenance", _GOOGLE_MAINTENANCE_S)
        return None

    def _read(self, name: str) -> str:
        return _fetch(f"{self._instance}/{name}", {"Metadata-Flavor": "Google"}).strip()


class FileNotices:
    """A file whose appearance says that the host goes; its first line says why."""

    name = "file"

    def __init__(self, path: str) -> None:
        self._path = Path(path)

    def is_here(self) -> bool:
        """See `Source.is_here`."""
        return True

    def look(self) -> Notice | None:
        """See `Source.look`."""
        if not self._path.exists():
            return None
        lines = self._path.read_text(errors="replace").split("\n")
        return Notice(lines[0].strip() or f"{self._path} is there")


def sources_of(config: FailureConfig) -> list[Source]:
    """What `failure.preemption_notices` and `failure.notice_file` name; `auto`: every cloud, one may be here."""
    clouds: dict[str, Source] = {"aws": AwsNotices(), "google": GoogleNotices()}
    names = list(clouds) if config.preemption_notices == "auto" else config.preemption_notices
    found = [clouds[name] for name in names]
    return [*found, FileNotices(config.notice_file)] if config.notice_file else found


class NoticeWatch:
    """A thread that looks until there is a notice, and tells it once; a context manager.

    Args:
        tell: called in the thread; what it raises is logged, and it is called again at the next look.
        is_sure: the sources are known to be here: `failure.preemption_notices` names them.
    """

    def __init__(self, sources: Sequence[Source], tell: Callable[[Notice], None], *, is_sure: bool = False) -> None:
        self._sources, self._tell, self._is_sure = list(sources), tell, is_sure
        self._silent: set[str] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raydz-notices", daemon=True)

    def __enter__(self) -> NoticeWatch:
        if self._sources:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _watch(self) -> None:
        if not self._is_sure:
            self._sources = [source for source in self._sources if source.is_here()]
        while self._sources and not self._over.is_set():
            if any(self._looked_and_told(source) for source in self._sources):
                return
            self._over.wait(_POLL_S)

    def _looked_and_told(self, source: Source) -> bool:
        try:
            notice = source.look()
            self._silent.discard(source.name)
        except (OSError, ValueError) as error:
            if source.name not in self._silent:
                _logger.warning("no word of this host's end can be had from %s: %s", source.name, error)
            self._silent.add(source.name)
            return False
        if notice is None:
            return False
        try:
            self._tell(notice)
        except Exception as error:  # whatever stands in the way now may not in two seconds
            _logger.warning("the notice (%s) was not passed on: %s", notice.reason, error)
            return False
        return True


def _aws_notice(body: str, now: float) -> Notice | None:
    said = json.loads(body)
    action, at = said.get("action"), str(said.get("time", ""))
    if action not in ("terminate", "stop", "hibernate"):
        return None
    try:
        left_s = max(0.0, datetime.fromisoformat(at.replace("Z", "+00:00")).timestamp() - now)
    except ValueError:
        left_s = None
    return Notice(f"AWS says {action} at {at}", left_s)


def _fetch(url: str, headers: dict[str, str], method: str = "GET") -> str:
    """One request, past any proxy: metadata services are on the host's own link. Raises: OSError."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    request = urllib.request.Request(url, headers=headers, method=method)
    with opener.open(request, timeout=_ANSWER_S) as answer:
        return answer.read(65536).decode(errors="replace")

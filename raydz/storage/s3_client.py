"""boto3 clients: made when first needed, shared by stores with the same options, never pickled, never over a fork.

Neighbours: an `S3Connection` is owned by `s3.S3Store` and used by `s3_reader` and `s3_writer`; `s3_shared.py` keeps
the clients.
"""

from __future__ import annotations

import io
import logging
import os
import threading
from dataclasses import replace
from functools import cached_property
from typing import Any

from raydz.storage.bandwidth import Bandwidth, LimitedBody, process_bandwidth
from raydz.storage.options import S3Options, check_endpoint
from raydz.storage.probe import CHECKSUMS, CONDITIONS
from raydz.storage.s3_body import send_from_memory
from raydz.storage.s3_checksum import Checksum, pick_checksum
from raydz.storage.s3_errors import s3_errors
from raydz.storage.s3_shared import shared_client

ROUNDS = 4
"""Tries of one read or part, each of them `max_attempts` requests of boto3."""


class S3Connection:
    """Options plus this process's client. Credentials are found by every process, anew when where they are changes."""

    def __init__(self, options: S3Options, rounds: int = ROUNDS, weaknesses: frozenset[str] = frozenset()) -> None:
        self.options, self.rounds = options, rounds
        self.weaknesses = weaknesses  # that the self-test has found, see `probe`
        self._lock = threading.Lock()
        self._owner_pid = os.getpid()
        self._client: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {"options": self.options, "rounds": self.rounds, "weaknesses": self.weaknesses}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @property
    def client(self) -> Any:
        """The client of the calling process (boto3 clients are safe between threads, not over a fork)."""
        if self._owner_pid != os.getpid():
            # The parent's lock may be held by a thread that does not exist here.
            self._lock, self._client, self._owner_pid = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._client is None:
                _silence_debug()
                with s3_errors(self.place):
                    self._client = shared_client(self.options, self._make_client)
            return self._client

    def close(self) -> None:
        """Close the client's idle sockets, if there are any; other stores may share it, and it opens new ones."""
        if self._client is not None and self._owner_pid == os.getpid():
            self._client.close()

    def impatient(self) -> S3Connection:
        """A connection to the same store that gives up within seconds, for the probe."""
        return S3Connection(replace(self.options, connect_timeout_s=2.0, read_timeout_s=3.0, max_attempts=2), rounds=1)

    @property
    def place(self) -> str:
        """The endpoint, for error messages."""
        return self.endpoint_url or "AWS S3"

    @property
    def endpoint_url(self) -> str | None:
        """The endpoint in effect; boto3 reads the same two variables."""
        return self.options.endpoint_url or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")

    @cached_property
    def checksum(self) -> Checksum | None:
        """What uploads compute by themselves; None leaves it to boto3."""
        return pick_checksum(self.options, is_aws=self.endpoint_url is None)

    @property
    def has_conditions(self) -> bool:
        """Whether the store is taken to refuse a second conditional put."""
        return CONDITIONS not in self.weaknesses

    @property
    def reads_back(self) -> bool:
        """Whether what was written is read and compared."""
        chosen = self.options.read_back
        return CHECKSUMS in self.weaknesses if chosen == "auto" else chosen

    @property
    def bandwidth(self) -> Bandwidth | None:
        """The limit on this process's bytes per second."""
        limit = self.options.bandwidth_limit
        return None if limit is None else process_bandwidth(limit)

    @property
    def encryption(self) -> dict[str, Any]:
        """Parameters of every request that makes an object."""
        if self.options.sse is None:
            return {}
        chosen: dict[str, Any] = {"ServerSideEncryption": self.options.sse}
        if self.options.sse_kms_key_id:
            chosen |= {"SSEKMSKeyId": self.options.sse_kms_key_id}
        if self.options.sse == "aws:kms":
            chosen |= {"BucketKeyEnabled": True}  # one call to KMS per bucket key, not one per object
        return chosen

    def _make_client(self) -> Any:
        import boto3

        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)  # from the environment it has not been looked at yet
        session = boto3.Session(profile_name=self.options.profile, region_name=self.options.region)
        region = session.region_name or ("us-east-1" if self.endpoint_url else None)
        client = session.client(
            "s3", endpoint_url=self.options.endpoint_url, region_name=region, config=self._client_config()
        )
        limit = send_from_memory if self.bandwidth is None else self._limit_body
        client.meta.events.register("before-send.s3", limit)
        return client

    def _limit_body(self, request: Any, **_: Any) -> None:
        """Slow the body down as it is sent: it was hashed and signed before, at full speed."""
        bandwidth, body = self.bandwidth, request.body
        if bandwidth is None or not body:
            return
        if isinstance(body, (bytes, bytearray)):
            body = io.BytesIO(body)
        if hasattr(body, "read"):
            request.body = LimitedBody(body, bandwidth)

    def _client_config(self) -> Any:
        from botocore.config import Config

        options = self.options
        path_style = bool(self.endpoint_url) if options.path_style == "auto" else options.path_style
        s3: dict[str, Any] = {"addressing_style": "path" if path_style else "virtual"}
        if self.checksum is not None and (self.endpoint_url or "https").startswith("https"):
            # Our CRC and TLS protect the body; boto3 would add a SHA-256 at a tenth of the CRC's speed.
            s3["payload_signing_enabled"] = False
        validate = "when_required" if options.checksum == "off" else "when_supported"
        return Config(
            s3=s3,
            connect_timeout=options.connect_timeout_s,
            read_timeout=options.read_timeout_s,
            retries={"mode": "standard", "total_max_attempts": options.max_attempts},
            max_pool_connections=4 * options.concurrency,  # a save, a load and an export at once
            request_checksum_calculation=validate,
            response_checksum_validation=validate,
            tcp_keepalive=True,
        )


def _silence_debug() -> None:
    """Hold boto3's loggers at INFO or above: at DEBUG they print key ids, session tokens and signatures."""
    for name in ("boto3", "botocore", "s3transfer", "urllib3"):
        logger = logging.getLogger(name)
        if logger.getEffectiveLevel() < logging.INFO:
            logger.setLevel(logging.INFO)

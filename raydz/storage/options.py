"""How to reach an S3 store. No field can hold a secret: credentials come from boto3's own chain.

Neighbours: filled from the `storage` section of the configuration; read by `s3_client`, `s3_checksum`, `s3_writer`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from raydz.errors import ConfigError

MIB = 1 << 20

CREDENTIALS_REMEDY = (
    "leave keys out of the configuration: boto3 finds them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
    "in a profile, or from the role of the machine or pod"
)


@dataclass(frozen=True)
class S3Options:
    """Endpoint, integrity and transfer settings of one S3 store.

    Args:
        endpoint_url: of a store that is not AWS; None takes AWS_ENDPOINT_URL_S3, AWS_ENDPOINT_URL, then AWS itself.
        region: None takes boto3's own choice, or us-east-1 when an endpoint is set.
        path_style: bucket in the path (True) or in the host name (False); auto: in the path with an endpoint.
        profile: name of a profile in the AWS config files.
        checksum: crc64nvme, crc32c, crc32: computed here, checked by the store, over the whole object; off: none;
            auto: crc64nvme on AWS, elsewhere what boto3 sends by default.
        concurrency: requests in flight of one writer or one large read.
        part_bytes_min, part_bytes_max: bounds for parts of an upload; a larger object than 10,000 parts exceeds them.
        sse, sse_kms_key_id: server-side encryption, for example AES256, or aws:kms and a key.
        max_attempts: tries of one request inside boto3, with growing pauses.
        bandwidth_limit: bytes per second of this process, uploads and downloads together; None: no limit.
        read_back: read every object after writing it, and compare; auto: where the self-test has shown that the store
            does not check what it receives.
        conditional_put: what the self-test does with a store that ignores `If-None-Match`: require refuses it, warn
            goes on with a look before each such put, which two jobs at the same moment can both pass.
    """

    endpoint_url: str | None = None
    region: str | None = None
    path_style: Literal["auto"] | bool = "auto"
    profile: str | None = None
    checksum: Literal["auto", "crc64nvme", "crc32c", "crc32", "off"] = "auto"
    concurrency: int = 8
    part_bytes_min: int = 16 * MIB
    part_bytes_max: int = 64 * MIB
    sse: str | None = None
    sse_kms_key_id: str | None = None
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 60.0
    max_attempts: int = 10
    bandwidth_limit: float | None = None
    read_back: Literal["auto"] | bool = "auto"
    conditional_put: Literal["require", "warn"] = "require"

    def __post_init__(self) -> None:
        """Refuse what cannot work.

        Raises:
            ConfigError: names the field; never repeats an endpoint that carries credentials.
        """
        if self.endpoint_url is not None:
            check_endpoint(self.endpoint_url)
        choices = {
            "path_style": ("auto", True, False),
            "checksum": ("auto", "crc64nvme", "crc32c", "crc32", "off"),
            "read_back": ("auto", True, False),
            "conditional_put": ("require", "warn"),
        }
        for field, allowed in choices.items():
            if getattr(self, field) not in allowed:
                _refuse(field, getattr(self, field), " | ".join(map(str, allowed)))
        for field in ("concurrency", "max_attempts", "connect_timeout_s", "read_timeout_s"):
            if not getattr(self, field) > 0:
                _refuse(field, getattr(self, field), "more than 0")
        if self.bandwidth_limit is not None and not self.bandwidth_limit > 0:
            _refuse("bandwidth_limit", self.bandwidth_limit, "bytes per second, more than 0")
        if not 5 * MIB <= self.part_bytes_min <= self.part_bytes_max <= 5 << 30:
            bounds = f"{self.part_bytes_min}..{self.part_bytes_max}"
            _refuse("part_bytes_min, part_bytes_max", bounds, "5 MiB <= min <= max <= 5 GiB, as S3 demands")
        if self.sse_kms_key_id and not (self.sse or "").startswith("aws:kms"):
            _refuse("sse", self.sse, "aws:kms, because sse_kms_key_id is set")


def _refuse(field: str, got: object, wanted: str) -> None:
    raise ConfigError("an impossible storage option", where=f"storage.{field}", got=got, wanted=wanted)


def check_endpoint(endpoint_url: str) -> None:
    """Refuse an endpoint that is none, or that carries credentials, which are not repeated.

    Raises:
        ConfigError: names what is wrong with it.
    """
    parts = urlsplit(endpoint_url)
    if parts.username is not None or parts.password is not None or parts.query:
        raise ConfigError(
            "credentials in an endpoint", where="storage.endpoint_url", got="(hidden)", remedy=CREDENTIALS_REMEDY
        )
    if parts.scheme not in ("http", "https") or not parts.hostname:
        _refuse("endpoint_url", endpoint_url, "for example https://s3.example.com or http://127.0.0.1:8333")

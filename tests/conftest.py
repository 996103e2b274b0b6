"""Fixtures that tests of several packages share."""

from __future__ import annotations

from tests.support.ranks import ranks
from tests.support.seaweed import s3_env, s3_server, s3_server_https

__all__ = ["ranks", "s3_env", "s3_server", "s3_server_https"]

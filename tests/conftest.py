"""Fixtures that tests of several packages share."""

from __future__ import annotations

from tests.support.ranks import ranks
from tests.support.ray_cluster import ray_cluster
from tests.support.seaweed import s3_env, s3_server, s3_server_https

__all__ = ["ranks", "ray_cluster", "s3_env", "s3_server", "s3_server_https"]

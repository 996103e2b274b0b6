"""A run on a store that does not keep its promises: every rank makes up for what rank 0's self-test has found."""

from __future__ import annotations

import dataclasses
import os

import pytest

from raydz.config import load
from raydz.errors import ConfigError
from raydz.storage import S3Options
from raydz.train.setup import storage_options
from tests.support import old_store as old
from tests.train.runs import run_config, run_on_rank, try_on_rank


def with_environment(rank, world_size, env, function, *args):
    os.environ.update(env)
    try:
        return function(rank, world_size, *args)
    finally:
        for name in env:
            del os.environ[name]


def config_for(tmp_path, server, proxy, **storage):
    return run_config(
        tmp_path, checkpoint={"dir": f"s3://{server.bucket()}/runs", "every": 3}, train={"steps": 3},
        storage={"endpoint_url": proxy.endpoint_url, **storage},
    )  # fmt: skip


@pytest.mark.s3
def test_every_rank_reads_back_from_a_store_that_accepts_damage(ranks, s3_env, tmp_path):
    with old.old_store(s3_env.endpoint_url, *old.CHECKSUMS) as proxy:
        config = config_for(tmp_path, s3_env, proxy)
        results = ranks(2).run(with_environment, s3_env.env, run_on_rank, config)
    assert [result.status for result in results] == ["finished", "finished"]
    for name in ("rank-00000-of-00002", "rank-00001-of-00002", "manifest.json"):
        methods = [method for method, path in proxy.seen if name in path]
        assert methods.count("PUT") == 1 and "GET" in methods[methods.index("PUT") :], (name, methods)


@pytest.mark.s3
@pytest.mark.slow
def test_damage_on_the_way_fails_the_save_and_not_the_run(ranks, s3_env, tmp_path):
    def damages(method, path):
        return method == "PUT" and "rank-00001" in path

    with old.old_store(s3_env.endpoint_url, *old.CHECKSUMS, damages=damages) as proxy:
        config = config_for(tmp_path, s3_env, proxy) | {"train": {"steps": 3, "eval_every": 0, "device": "cpu"}}
        told = ranks(2).run(with_environment, s3_env.env, try_on_rank, config)
    assert told[0][0] == "CheckpointError" and "other bytes than were written" in told[0][1]


@pytest.mark.s3
@pytest.mark.parametrize("rule", ["require", pytest.param("warn", marks=pytest.mark.slow)])
def test_a_store_that_ignores_conditions_is_refused_or_allowed(ranks, s3_env, tmp_path, rule):
    with old.old_store(s3_env.endpoint_url, *old.CONDITIONS) as proxy:
        config = config_for(tmp_path, s3_env, proxy, conditional_put=rule)
        told = ranks(2).run(with_environment, s3_env.env, try_on_rank, config)
    if rule == "require":
        assert told[0] == told[1] and told[0][0] == "StorageError" and "overwrite each other" in told[0][1]
    else:
        assert told == [("Result", "finished")] * 2


def test_every_storage_key_reaches_the_store():
    given = {
        "endpoint_url": "http://127.0.0.1:1", "region": "eu-west-1", "path_style": True, "profile": "p",
        "checksum": "crc32c", "concurrency": 3, "bandwidth_limit": 5e6, "part_bytes_min": 6 << 20,
        "part_bytes_max": 7 << 20, "read_back": True, "conditional_put": "warn", "sse": "aws:kms",
        "sse_kms_key_id": "alias/training", "connect_timeout_s": 1.5, "read_timeout_s": 2.5, "max_attempts": 4,
    }  # fmt: skip
    assert given.keys() == {field.name for field in dataclasses.fields(S3Options)}
    assert dataclasses.asdict(storage_options(load({"storage": given}))) == given
    assert storage_options(load({})) == S3Options()


def test_parts_that_s3_does_not_take_are_refused():
    with pytest.raises(ConfigError, match="impossible storage option"):
        storage_options(load({"storage": {"part_bytes_min": 1 << 20}}))

"""MlflowSink against real MLflow stores. The oracle is MLflow's own client, asked afterwards."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raydz.errors import ConfigError
from raydz.tracking.journal import Point
from raydz.tracking.mlflow import MlflowSink, TrackedRun, settle_run


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    return f"sqlite:///{tmp_path_factory.mktemp('store')}/mlflow.db"


@pytest.fixture(scope="module")
def client(store):
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store)


@pytest.fixture
def make_sink(store, request):
    def make(attempt=0, uri=store, **fields) -> MlflowSink:
        return MlflowSink(TrackedRun(uri, "tests", request.node.name, "a name", attempt=attempt, **fields))

    return make


def points(steps, attempt=0, loss=1.0) -> list[Point]:
    return [Point(n, 1_700_000_000_000 + 1000 * n + attempt, {"loss": loss, "attempt": float(attempt)}) for n in steps]


def history(client, run_id, name="loss") -> list[tuple[int, float]]:
    return sorted((row.step, row.value) for row in client.get_metric_history(run_id, name))


def test_one_run_over_restarts_and_it_tells_its_largest_step(make_sink, client):
    first = make_sink()
    assert first.connect() == -1
    first.publish(points(range(0, 8)))
    again = make_sink(attempt=1)
    assert again.connect() == 7
    assert again.run_id == first.run_id
    run = client.get_run(first.run_id)
    assert run.info.run_name == "a name"
    assert history(client, first.run_id) == [(n, 1.0) for n in range(8)]


def test_a_repeated_request_leaves_each_point_once(make_sink, client):
    sink = make_sink()
    sink.connect()
    sink.publish(points(range(1, 6)))
    sink.publish(points(range(1, 6)))  # as after a time-out whose request had arrived
    assert history(client, sink.run_id) == [(n, 1.0) for n in range(1, 6)]


def test_more_metrics_than_a_request_takes_are_split_at_steps(make_sink, client, monkeypatch):
    sink = make_sink()
    sink.connect()
    many = [Point(n, n, {f"m{i}": 1.0 for i in range(400)} | {"attempt": 0.0}) for n in range(1, 6)]
    sizes = []
    log_batch = sink._client.log_batch
    monkeypatch.setattr(
        sink._client,
        "log_batch",
        lambda run, metrics, **kw: sizes.append(len(metrics)) or log_batch(run, metrics, **kw),
    )
    sink.publish(many)
    assert sizes == [802, 802, 401]
    assert [step for step, _ in history(client, sink.run_id, "m399")] == [1, 2, 3, 4, 5]


def test_nan_and_inf_are_stored(make_sink, client):
    sink = make_sink()
    sink.connect()
    sink.publish([Point(1, 1, {"loss": math.nan, "grad_norm": math.inf})])
    assert math.isnan(history(client, sink.run_id)[0][1])
    assert history(client, sink.run_id, "grad_norm")[0][1] > 1e300


def test_a_dead_attempt_is_marked_when_the_next_begins(make_sink, client):
    make_sink().connect()  # its process dies without a word
    second = make_sink(attempt=1)
    second.connect()
    run = client.get_run(second.run_id)
    assert run.info.status == "RUNNING"
    assert run.data.tags["raydz.attempt.0.status"] == "KILLED"
    assert run.data.tags["raydz.attempt"] == "1"


def test_a_connection_that_is_made_again_is_not_a_dead_attempt(make_sink, client):
    sink = make_sink()
    sink.connect()
    sink.connect()
    assert "raydz.attempt.0.status" not in client.get_run(sink.run_id).data.tags


def test_failure_is_explained_without_secrets_and_cleared_by_a_success(make_sink, client):
    sink = make_sink()
    sink.connect()
    sink.finish("FAILED", "CUDA out of memory at https://ann:hunter2hunter2@host/")
    run = client.get_run(sink.run_id)
    assert run.info.status == "FAILED" and run.info.end_time
    assert run.data.tags["raydz.error"] == "CUDA out of memory at https://***@host/"
    again = make_sink(attempt=1)
    again.connect()
    assert client.get_run(sink.run_id).info.status == "RUNNING"
    again.finish("FINISHED", None)
    run = client.get_run(sink.run_id)
    assert run.info.status == "FINISHED"
    assert "raydz.error" not in run.data.tags
    assert "out of memory" in run.data.tags["raydz.attempt.0.error"]
    assert run.data.tags["raydz.attempt.0.status"] == "FAILED"


def test_params_stay_and_changes_after_a_restart_become_tags(make_sink, client):
    old = {f"p{n}": n for n in range(150)} | {"world_size": 1, "long": "x" * 9000}
    make_sink(params=old).connect()
    sink = make_sink(attempt=3, params=old | {"world_size": 16, "added": "yes"})
    sink.connect()
    data = client.get_run(sink.run_id).data
    assert len(data.params) == 153
    assert data.params["world_size"] == "1" and data.params["added"] == "yes"
    assert data.tags["raydz.attempt.3.world_size"] == "16"
    assert [tag for tag in data.tags if tag.startswith("raydz.attempt.3.")] == ["raydz.attempt.3.world_size"]


def test_a_stage_is_nested_under_its_parent(make_sink, client):
    parent = make_sink()
    parent.connect()
    child = MlflowSink(TrackedRun(parent._run.tracking_uri, "tests", "a child", "sft", parent_run_id=parent.run_id))
    child.connect()
    assert child.run_id != parent.run_id
    assert client.get_run(child.run_id).data.tags["mlflow.parentRunId"] == parent.run_id


def test_texts_land_beside_the_database_and_not_in_the_working_directory(
    make_sink, client, store, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    sink = make_sink()
    sink.connect()
    sink.log_text("config.yaml", "train: {steps: 5}\n")
    assert list(tmp_path.iterdir()) == []
    assert [f.path for f in client.list_artifacts(sink.run_id)] == ["config.yaml"]
    local = client.download_artifacts(sink.run_id, "config.yaml", str(tmp_path))
    assert Path(local).read_text() == "train: {steps: 5}\n"


def test_the_driver_settles_a_run_that_nobody_ended(make_sink, client, store, request):
    sink = make_sink(attempt=2)
    sink.connect()
    assert settle_run(store, "tests", request.node.name, "FAILED", "too many restarts") is True
    run = client.get_run(sink.run_id)
    assert run.info.status == "FAILED"
    assert run.data.tags["raydz.attempt.2.error"] == "too many restarts"
    assert settle_run(store, "tests", request.node.name, "KILLED") is False, "an ended run keeps its status"
    assert client.get_run(sink.run_id).info.status == "FAILED"
    assert settle_run(store, "no such experiment", "x", "KILLED") is False


def test_a_deleted_experiment_is_a_config_error(store, client):
    client.delete_experiment(client.create_experiment("deleted one"))
    with pytest.raises(ConfigError, match="deleted one"):
        MlflowSink(TrackedRun(store, "deleted one", "k", "n")).connect()


@pytest.mark.parametrize("uri", ["carrier-pigeon://host", "file:///tmp/none-such-raydz"])
def test_a_store_that_mlflow_refuses_is_a_config_error(make_sink, uri):
    with pytest.raises(ConfigError, match="MLflow refuses"):
        make_sink(uri=uri).connect()


def test_a_key_that_would_break_the_search_is_refused():
    with pytest.raises(ConfigError, match="quote"):
        MlflowSink(TrackedRun("sqlite:///x.db", "e", "it's", "n"))

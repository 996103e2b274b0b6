"""The whole line: tracker, journal, publisher, a real MLflow server over http that dies and comes back."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time

import pytest

from raydz.errors import ConfigError, StorageError
from raydz.tracking import tracker as tracker_module
from raydz.tracking.publisher import Publisher
from raydz.tracking.sink import Pace
from raydz.tracking.tracker import Tracker


@pytest.fixture
def start(tmp_path, request):
    """Start a tracker in this test's run folder; whatever is still open at the end is closed."""
    trackers: list[Tracker] = []

    def start(mlflow_uri=None, run_dir=tmp_path / "run", **fields) -> Tracker:
        defaults = {"run_key": request.node.name, "run_name": "n", "config_text": "train: {}\n", "params": {"lr": 0.1}}
        trackers.append(Tracker.start(run_dir=run_dir, mlflow_uri=mlflow_uri, experiment="t", **defaults | fields))
        return trackers[-1]

    yield start
    for tracker in trackers:
        tracker.finish("KILLED", timeout_s=0.1)


@pytest.fixture
def quick_publisher(monkeypatch):
    pace = Pace(interval_s=0.2, batch_points=10, retry_min_s=0.1, retry_max_s=0.5)
    monkeypatch.setattr(tracker_module, "Publisher", lambda path, sink: Publisher(path, sink, pace))


def die(tracker: Tracker) -> None:
    """What SIGKILL leaves: nothing more is sent, nothing is closed properly."""
    tracker._sink.publish = tracker._sink.finish = lambda *_: (_ for _ in ()).throw(OSError("killed"))
    tracker.finish("KILLED", timeout_s=0.01)


def events_of(run_dir) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]


def history(uri, run_id, name="loss") -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    rows = MlflowClient(tracking_uri=uri).get_metric_history(run_id, name)
    return sorted((row.step, row.value) for row in rows)


def unused_uri() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


def test_without_a_uri_only_the_journal_is_kept_and_mlflow_is_not_imported(tmp_path):
    code = (
        "import sys; from raydz.tracking import Tracker\n"
        "t = Tracker.start(run_dir=sys.argv[1], run_key='k', run_name='n', config_text='', params={},\n"
        "                  mlflow_uri=None, experiment='e')\n"
        "t.log_baseline({'memory_peak_bytes': 5.0})\n"
        "t.log_step(1, {'loss': 2.0}); t.log_event('checkpoint', {'step': 1})\n"
        "assert t.mlflow_run_id is None and t.finish('FINISHED') == 0\n"
        "assert not {'mlflow', 'torch'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
    lines = [json.loads(line) for line in (tmp_path / "journal.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"]) for line in lines] == [(1, 2.0)]
    assert [event["event"] for event in events_of(tmp_path)] == ["start", "baseline", "checkpoint", "finish"]


@pytest.mark.slow
def test_a_server_that_dies_and_comes_back_gets_each_step_once(start, mlflow_server, quick_publisher):
    tracker = start(mlflow_server.uri)
    run_id = tracker.mlflow_run_id
    for step in range(1, 21):
        tracker.log_step(step, {"loss": 1.0 / step})
    tracker._publisher.flush(30)
    mlflow_server.kill()
    for step in range(21, 61):
        tracker.log_step(step, {"loss": 1.0 / step})
    tracker._publisher.flush(30)
    assert tracker.failures > 0
    mlflow_server.start()
    assert tracker.finish("FINISHED", timeout_s=60) == 0
    assert tracker.mlflow_run_id == run_id
    assert history(mlflow_server.uri, run_id) == [(n, 1.0 / n) for n in range(1, 61)]
    assert tracker.lost_points == 0


@pytest.mark.slow
def test_a_restart_from_an_earlier_step_doubles_no_point(start, mlflow_server, quick_publisher, tmp_path):
    first = start(mlflow_server.uri)
    for step in range(1, 31):
        first.log_step(step, {"loss": 1.0})
    first._publisher.flush(30)
    first.log_step(31, {"loss": 1.0})
    die(first)
    second = start(mlflow_server.uri, resume_step=25, attempt=1)
    for step in range(26, 41):
        second.log_step(step, {"loss": 2.0})
    assert second.finish("FINISHED") == 0
    assert second.mlflow_run_id == first.mlflow_run_id
    expected = [(n, 1.0) for n in range(1, 31)] + [(n, 2.0) for n in range(31, 41)]
    assert history(mlflow_server.uri, first.mlflow_run_id) == expected
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, 41))


@pytest.mark.slow
def test_a_restart_on_another_node_without_the_journal_doubles_no_point(
    start, mlflow_server, quick_publisher, tmp_path
):
    first = start(mlflow_server.uri)
    for step in range(1, 11):
        first.log_step(step, {"loss": 1.0})
    first._publisher.flush(30)
    die(first)
    second = start(mlflow_server.uri, run_dir=tmp_path / "other node", resume_step=8, attempt=1)
    for step in range(9, 15):
        second.log_step(step, {"loss": 2.0})
    assert second.finish("FINISHED") == 0
    steps = [step for step, _ in history(mlflow_server.uri, second.mlflow_run_id)]
    assert steps == list(range(1, 15))


@pytest.mark.slow
def test_the_baseline_is_in_mlflow_before_the_first_step(start, mlflow_server):
    tracker = start(mlflow_server.uri)  # with the real pace: it must not wait for an interval
    tracker.log_baseline({"memory_peak_bytes": 7.0})
    assert history(mlflow_server.uri, tracker.mlflow_run_id, "memory_peak_bytes") == [(0, 7.0)]
    from mlflow import MlflowClient

    client = MlflowClient(tracking_uri=mlflow_server.uri)
    assert [f.path for f in client.list_artifacts(tracker.mlflow_run_id)] == ["config.yaml"]
    assert client.get_run(tracker.mlflow_run_id).data.params == {"lr": "0.1"}


@pytest.mark.slow
def test_mlflow_down_at_the_start_costs_a_warning_and_the_next_start_replays(
    start, mlflow_server, quick_publisher, caplog
):
    tracker = start(unused_uri())
    tracker.log_baseline({"memory_peak_bytes": 7.0})
    for step in range(1, 6):
        tracker.log_step(step, {"loss": 1.0})
    assert tracker.mlflow_run_id is None
    assert tracker.finish("FAILED", "lost a node", timeout_s=0.5) == 5
    assert caplog.text.count("training goes on") == 1
    again = start(mlflow_server.uri, resume_step=5, attempt=1)
    again.log_baseline({"memory_peak_bytes": 9.0})
    again.log_step(6, {"loss": 1.0})
    assert again.finish("FINISHED") == 0
    assert history(mlflow_server.uri, again.mlflow_run_id) == [(n, 1.0) for n in range(1, 7)]
    assert history(mlflow_server.uri, again.mlflow_run_id, "memory_peak_bytes") == [(0, 7.0)]


def test_a_step_is_recorded_while_mlflow_blocks_for_ever(start, sink, monkeypatch, tmp_path):
    sink.gate.clear()
    monkeypatch.setattr(tracker_module, "Publisher", lambda path, _: Publisher(path, sink))
    monkeypatch.setattr(tracker_module, "_CONNECT_S", 0.05)
    monkeypatch.setattr(tracker_module, "_BASELINE_S", 0.05)
    tracker = start("http://ignored")
    tracker.log_baseline({"memory_peak_bytes": 7.0})
    for step in range(1, 301):  # would never end if one of them waited for the sink
        tracker.log_step(step, {"loss": 1.0})
        tracker.set_tags({"checkpoint": str(step)})
    assert len((tmp_path / "run" / "journal.jsonl").read_text().splitlines()) == 300
    assert tracker.finish("FINISHED", timeout_s=0.05) == 300
    sink.gate.set()


@pytest.mark.parametrize("place", [{"resume_step": 3}, {"attempt": 1}])
def test_a_restart_does_not_wait_for_mlflow(start, monkeypatch, place):
    monkeypatch.setattr(Publisher, "flush", lambda *_: pytest.fail("waited"))
    tracker = start(unused_uri(), **place)
    tracker.log_baseline({"memory_peak_bytes": 7.0})
    tracker.log_step(4, {"loss": 1.0})


def test_a_store_that_can_never_work_stops_a_first_start_but_not_a_restart(start):
    with pytest.raises(ConfigError, match="MLflow refuses"):
        start("carrier-pigeon://host")
    tracker = start("carrier-pigeon://host", resume_step=3, attempt=1)
    tracker.log_step(4, {"loss": 1.0})


def test_credentials_in_the_uri_are_refused_before_anything_is_written(start, tmp_path):
    with pytest.raises(ConfigError, match="holds credentials"):
        start("https://ann:hunter2hunter2@host")
    assert list(tmp_path.iterdir()) == []


def test_a_journal_that_cannot_be_written_costs_points_not_the_training(start, monkeypatch, caplog):
    tracker = start()

    def full(*_):
        raise StorageError("cannot append a line", where="journal.jsonl", got="disk full")

    with monkeypatch.context() as patch:
        patch.setattr(tracker._journal._file, "append", full)
        tracker.log_step(1, {"loss": 1.0})
        tracker.log_step(2, {"loss": 1.0})
    tracker.log_step(3, {"loss": 1.0})
    assert tracker.lost_points == 2
    assert caplog.text.count("disk full") == 1


def test_a_run_folder_that_cannot_be_written_stops_the_start(start, tmp_path):
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StorageError):
        start()
    with pytest.raises(ConfigError, match="not local"):
        start(run_dir="s3://bucket/runs")


def test_unknown_names_and_statuses_are_refused(start):
    tracker = start()
    with pytest.raises(ConfigError, match="unknown metric"):
        tracker.log_step(1, {"lss": 1.0})
    with pytest.raises(ConfigError, match="unknown metric"):
        tracker.log_baseline({"lss": 1.0})
    with pytest.raises(ValueError, match="DONE"):
        tracker.finish("DONE")


def test_events_hold_any_json_value_and_no_secret(start, tmp_path):
    tracker = start()
    tracker.log_event("evaluation", {"loss": float("nan"), "error": "http://a:hunter2hunter2@h", "sets": ["x"]})
    event = events_of(tmp_path / "run")[-1]
    assert abs(event.pop("time") - time.time()) < 60
    expected = {"event": "evaluation", "attempt": 0, "loss": "nan", "error": "http://***@h", "sets": ["x"]}
    assert event == expected

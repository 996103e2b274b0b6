from __future__ import annotations

import logging
import threading
import time

import pytest

from raydz.errors import ConfigError
from raydz.tracking.journal import Journal, Point
from raydz.tracking.publisher import Publisher
from raydz.tracking.sink import Backoff, Pace

_FAST = Pace(interval_s=0.02, batch_points=10, retry_min_s=0.01, retry_max_s=0.05)
_SLOW = Pace(interval_s=600, batch_points=10, retry_min_s=600, retry_max_s=600)


@pytest.fixture
def journal(tmp_path):
    journal = Journal.open(tmp_path / "journal.jsonl", 0, 0)
    yield journal
    journal.close()


def add(journal, publisher, steps) -> None:
    for step in steps:
        journal.append(step, {"loss": float(step)})
        publisher.line_added()


def wait_until(condition, timeout_s=10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.005)


def test_every_step_arrives_once_and_in_order(journal, sink):
    publisher = Publisher(journal.path, sink, _FAST)
    add(journal, publisher, range(1, 96))
    assert publisher.close(10, "FINISHED") == 0
    assert sink.steps == list(range(1, 96))
    assert [p.metrics["loss"] for p in sink.points] == [float(n) for n in range(1, 96)]
    assert sink.endings == [("FINISHED", None)]


def test_a_full_batch_is_sent_before_the_interval_ends(journal, sink):
    publisher = Publisher(journal.path, sink, _SLOW)
    assert publisher.flush(10)
    add(journal, publisher, range(1, 11))
    wait_until(lambda: sink.steps == list(range(1, 11)))
    publisher.close(10, "FINISHED")


def test_a_sink_that_blocks_for_ever_blocks_nobody(journal, sink):
    sink.gate.clear()
    publisher = Publisher(journal.path, sink, _FAST)
    assert sink.entered.wait(10)
    # The sink never returns: were any of these to wait for it, the test would never end.
    add(journal, publisher, range(1, 1001))
    publisher.annotate(tags={"a": "b"}, texts={"c": "d"})
    publisher.set_baseline(Point(0, 0, {"loss": 1.0}))
    assert publisher.flush(0.05) is False
    assert publisher.close(0.05, "FINISHED") == 1000
    assert sink.steps == [] and sink.endings == []
    sink.gate.set()


def test_after_an_outage_everything_is_replayed_once(journal, sink, caplog):
    caplog.set_level(logging.INFO, "raydz")
    publisher = Publisher(journal.path, sink, _FAST)
    add(journal, publisher, range(1, 6))
    publisher.flush(10)
    sink.down = True
    add(journal, publisher, range(6, 60))
    wait_until(lambda: publisher.failures >= 4)
    sink.down = False
    wait_until(lambda: len(sink.steps) == 59)
    assert publisher.close(10, "FINISHED") == 0
    assert sink.steps == list(range(1, 60))
    warnings = [r for r in caplog.records if r.levelno >= logging.WARNING]
    assert len(warnings) == 1, "one warning an outage"
    assert "hunter2secret" not in caplog.text


def test_points_that_were_left_go_out_at_the_next_start(journal, sink, tmp_path):
    publisher = Publisher(journal.path, sink, _FAST)
    add(journal, publisher, range(1, 6))
    publisher.flush(10)
    sink.down = True
    add(journal, publisher, range(6, 9))
    assert publisher.close(0.2, "FINISHED") == 3
    assert sink.endings == [], "a run that is not complete is not finished"
    sink.down = False
    sink.held_step = 5
    assert Publisher(journal.path, sink, _FAST).close(10, "FINISHED") == 0
    assert sink.steps == list(range(1, 9))


def test_steps_that_the_sink_holds_are_not_sent_again(journal, sink):
    sink.held_step = 7
    publisher = Publisher(journal.path, sink, _FAST)
    publisher.set_baseline(Point(0, 0, {"loss": 1.0}))
    add(journal, publisher, range(4, 11))
    publisher.close(10, "FINISHED")
    assert sink.steps == [8, 9, 10]


def test_the_baseline_goes_first(journal, sink):
    publisher = Publisher(journal.path, sink, _SLOW)
    publisher.flush(10)
    publisher.set_baseline(Point(0, 0, {"loss": 1.0}))
    assert publisher.flush(10)
    assert sink.steps == [0]
    add(journal, publisher, [1])
    publisher.close(10, "FINISHED")
    assert sink.steps == [0, 1]


def test_a_dead_artifact_store_does_not_hold_up_points_or_the_end(journal, sink):
    sink.texts_down = True
    publisher = Publisher(journal.path, sink, _FAST)
    publisher.annotate(tags={"checkpoint": "s3://b/5"}, texts={"config.yaml": "a: 1"})
    add(journal, publisher, [1, 2])
    assert publisher.close(10, "FINISHED") == 0
    assert sink.steps == [1, 2] and sink.endings == [("FINISHED", None)]
    assert sink.tags == {"checkpoint": "s3://b/5"} and sink.texts == {}
    assert publisher.failures >= 1


def test_a_text_is_stored_once_when_its_store_is_back(journal, sink):
    sink.texts_down = True
    publisher = Publisher(journal.path, sink, _FAST)
    publisher.annotate(texts={"config.yaml": "a: 1"})
    wait_until(lambda: publisher.failures >= 2)
    sink.texts_down = False
    wait_until(lambda: sink.texts == {"config.yaml": "a: 1"})
    calls = sink.calls
    publisher.flush(10)
    assert sink.calls == calls
    publisher.close(10, "FINISHED")


def test_a_full_batch_does_not_hammer_a_sink_that_is_down(journal, sink):
    sink.down = True
    publisher = Publisher(journal.path, sink, _SLOW)
    publisher.flush(10)
    calls = sink.calls
    add(journal, publisher, range(1, 500))
    time.sleep(0.1)
    assert sink.calls <= calls + 1
    publisher.close(0.05, "KILLED")


def test_a_refusal_ends_the_thread_and_keeps_its_reason(journal, sink):
    def refuse():
        raise ConfigError("no such store")

    sink.connect = refuse
    publisher = Publisher(journal.path, sink, _FAST)
    publisher.flush(10)
    assert "no such store" in str(publisher.refusal)
    add(journal, publisher, [1, 2])
    assert publisher.close(1, "FINISHED") == 2


def test_waits_double_up_to_the_limit_with_jitter():
    backoff = Backoff(Pace(retry_min_s=1, retry_max_s=8))
    for limit in (1, 2, 4, 8, 8, 8):
        assert limit / 2 <= backoff.next_s() <= limit
    backoff.reset()
    assert backoff.next_s() <= 1
    first_waits = {Backoff(Pace()).next_s() for _ in range(20)}
    assert len(first_waits) > 10


def test_the_thread_cannot_hold_up_the_exit_of_the_process(journal, sink):
    sink.gate.clear()
    Publisher(journal.path, sink, _FAST)
    assert all(t.daemon for t in threading.enumerate() if t.name == "raydz-publisher")
    sink.gate.set()

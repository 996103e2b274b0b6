"""Second tries: only for what may pass, never more than asked for, and a pause can be ended."""

from __future__ import annotations

import threading
import time

import pytest

from raydz.errors import StorageError
from raydz.storage import StoreUnavailable
from raydz.storage.retry import with_retries


class Flaky:
    """Fails so many times, then returns how often it was called."""

    def __init__(self, failures: int, error: type[StorageError]) -> None:
        self.failures, self.error, self.calls = failures, error, 0

    def __call__(self) -> int:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error("no", where="here")
        return self.calls


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 0.001)


def test_a_failure_that_may_pass_is_tried_again() -> None:
    assert with_retries(Flaky(3, StoreUnavailable), rounds=4) == 4


def test_the_last_failure_is_raised() -> None:
    call = Flaky(100, StoreUnavailable)
    with pytest.raises(StoreUnavailable):
        with_retries(call, rounds=4)
    assert call.calls == 4


def test_a_lasting_failure_is_not_tried_again() -> None:
    call = Flaky(1, StorageError)
    with pytest.raises(StorageError):
        with_retries(call, rounds=4)
    assert call.calls == 1


def test_cancelling_ends_a_pause_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 60.0)
    cancelled = threading.Event()
    threading.Timer(0.1, cancelled.set).start()
    begin = time.monotonic()
    with pytest.raises(StoreUnavailable):
        with_retries(Flaky(1, StoreUnavailable), rounds=4, cancelled=cancelled)
    assert time.monotonic() - begin < 5


def test_pauses_grow_and_differ_between_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def pauses() -> list[float]:
        waited: list[float] = []
        stop = threading.Event()
        monkeypatch.setattr(stop, "wait", lambda pause_s: waited.append(pause_s))
        with pytest.raises(StoreUnavailable):
            with_retries(Flaky(100, StoreUnavailable), rounds=6, cancelled=stop)
        return waited

    monkeypatch.setattr("raydz.storage.retry.FIRST_PAUSE_S", 1.0)
    first, second = pauses(), pauses()
    assert len(first) == 5
    assert all(0 < pause_s <= 2**attempt for attempt, pause_s in enumerate(first))
    assert first[-1] >= 1.6  # a tenth of 16 s
    assert first != second

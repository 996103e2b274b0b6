"""Tags and small texts that wait for the publisher's next round. They live in memory only, one value a name.

Layer 3. Filled by the training thread through `tracking.publisher`, emptied by the publisher's thread into its sink.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

from raydz import log
from raydz.tracking.credentials import first_line
from raydz.tracking.sink import Backoff, Pace, Sink

_log = log.get(__name__)


class Notes:
    """What is still to be said about the run beside its points."""

    def __init__(self, pace: Pace) -> None:
        self._lock = threading.Lock()  # held for dict operations only, never while the sink works
        self._tags: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._backoff = Backoff(pace)
        self._texts_not_before = 0.0
        self.failures = 0

    def add(self, tags: Mapping[str, str], texts: Mapping[str, str]) -> None:
        """Add; a later value for a name replaces one that still waits."""
        with self._lock:
            self._tags.update(tags)
            self._texts.update(texts)

    @property
    def names(self) -> list[str]:
        """What still waits."""
        with self._lock:
            return [*self._tags, *self._texts]

    def send(self, sink: Sink, is_last: bool) -> None:
        """Hand over what waits.

        Texts go to an artifact store of their own, which may be down alone: their failure is counted and tried again
        later, and does not hold up the points. Tags go where the points go, so their failure is the sink's: it raises.

        Args:
            is_last: try the texts even if their waiting time is not over.
        """
        with self._lock:
            tags, texts = dict(self._tags), dict(self._texts)
        if tags:
            sink.set_tags(tags)
            with self._lock:
                self._tags = _without(self._tags, tags)
        if texts and (is_last or time.monotonic() >= self._texts_not_before):
            self._send_texts(sink, texts)

    def _send_texts(self, sink: Sink, texts: dict[str, str]) -> None:
        try:
            for name, text in texts.items():
                sink.log_text(name, text)
        except Exception as error:
            if not self._backoff.is_failing:
                _log.warning("tracking: %s not stored, will be tried again: %s", ", ".join(texts), first_line(error))
            self.failures += 1
            self._texts_not_before = time.monotonic() + self._backoff.next_s()
            return
        self._backoff.reset()
        with self._lock:
            self._texts = _without(self._texts, texts)


def _without(waiting: dict[str, str], sent: dict[str, str]) -> dict[str, str]:
    """What waits less what was sent; a value that was replaced meanwhile still waits."""
    return {name: value for name, value in waiting.items() if sent.get(name) != value}

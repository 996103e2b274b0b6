"""`events.jsonl` of a run whose workers are gone: what the driver still has to say.

Layer 3. While a run trains, `tracking.tracker` writes its events; `orchestrate/interruption.py` calls this between two
attempts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from raydz.tracking.credentials import redact_fields
from raydz.tracking.lines import LineFile, read_lines

EVENTS_NAME = "events.jsonl"


def append_event(run_dir: Path, kind: str, fields: Mapping[str, Any]) -> bool:
    """Add an event to the last attempt's; texts are cleared of secrets.

    Ownership: no worker of the run is alive.

    Returns:
        Whether it was: False where this host has no events of the run.

    Raises:
        StorageError: they are here and cannot be read or written.
    """
    path = run_dir / EVENTS_NAME
    if not path.exists():
        return False
    starts = sum(event.get("event") == "start" for event in read_lines(path))
    file = LineFile(path)
    try:
        line = {"event": kind, "time": round(time.time(), 3), "attempt": max(0, starts - 1)}
        file.append(line | redact_fields(dict(fields)))
    finally:
        file.close()
    return True

"""An interactive Python as a person has it: cells go in, functions are of `__main__`, Ctrl-C does not end it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.support.runs import REPOSITORY


class Console:
    """`python -i` on pipes, with a log of what it says. As a context manager; ended by pid.

    Each cell is compiled and executed in `__main__`, as a notebook does it, in the main thread.
    """

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._log = folder / "console.log"
        self._cells = 0
        with self._log.open("w") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-i", "-u", "-q"],
                env={**env, "PYTHONPATH": str(REPOSITORY)},
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
            )

    def __enter__(self) -> Console:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    @property
    def said(self) -> str:
        return self._log.read_text(errors="replace")

    def run(self, code: str, *, limit_s: float = 500, while_running: Callable[[], None] = lambda: None) -> str:
        """Execute a cell and return what was said meanwhile, tracebacks included."""
        self._cells += 1
        end, before = f"-- end of cell {self._cells}", len(self.said)
        assert self.process.stdin is not None
        self.process.stdin.write("import sys; sys.ps1 = sys.ps2 = ''\n")
        self.process.stdin.write(f"exec(compile({code!r}, 'cell {self._cells}', 'exec'), globals())\n")
        self.process.stdin.write(f"print('-- end of', 'cell {self._cells}')\n")
        self.process.stdin.flush()
        while_running()
        deadline = time.monotonic() + limit_s
        while end not in self.said[before:]:
            assert self.process.poll() is None, self.said[-3000:]
            assert time.monotonic() < deadline, self.said[-3000:]
            time.sleep(0.05)
        return self.said[before:].partition(end)[0]

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)

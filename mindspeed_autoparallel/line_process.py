"""A process that answers lines: one request per line of its standard input, one answer per line of its standard output.

A fresh interpreter neither imports the host's script again (as multiprocessing's spawn would) nor copies a process that
may have threads and devices open (as fork would).
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence


class LineProcess:
    """One such process; one thread sends requests, another may end it."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=dict(environment),
        )

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    def send(self, line: str) -> None:
        """Write one request; nothing happens when the process is gone, which ``receive`` reports."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def receive(self) -> str | None:
        """Return the next line of answer, or ``None`` when the process is gone."""
        assert self._process.stdout is not None
        try:
            return self._process.stdout.readline() or None
        except (OSError, ValueError):
            return None

    def ask(self, line: str) -> str | None:
        """Return the answer to one request, or ``None`` when the process is gone."""
        self.send(line)
        return self.receive()

    def last_words(self, num_lines: int) -> tuple[int, str]:
        """Wait for the end; return the exit code and the last lines of standard error."""
        code = self._process.wait()
        self._errors.seek(0)
        return code, "\n".join(self._errors.read().strip().splitlines()[-num_lines:])

    def end(self) -> None:
        """Kill the process and wait until it is gone."""
        self._process.kill()
        self._process.wait()

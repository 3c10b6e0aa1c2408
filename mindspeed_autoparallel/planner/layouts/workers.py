"""Additional processes that run tasks. They change the time of a search, never its result.

If no process can be started, or one dies, this process does the work.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from types import TracebackType
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.interrupts import LONGEST_WAIT_S
from mindspeed_autoparallel.line_process import LineProcess
from mindspeed_autoparallel.planner.layouts.tasks import Outcome, Request, Task, perform
from mindspeed_autoparallel.spec.codec import from_json, to_json

MAX_WORKERS = 8
LEAST_S = 0.1
"""Seconds for a task whose time passed while it waited: enough to bound it."""
_ENTRY = "from mindspeed_autoparallel.planner.layouts.workers import serve; serve()"


@dataclass(frozen=True)
class _Job:
    """A task of a list that was requested together."""

    place: int
    task: Task
    requested: float
    """Time of the request, of ``time.monotonic``."""
    plan_known: threading.Event | None
    """Set once a plan is known; late tasks are skipped from then on. ``None``: every task is run."""

    def begun_late(self) -> Task:
        """Return the task with its remaining seconds."""
        return replace(self.task, seconds=max(LEAST_S, self.task.seconds - (time.monotonic() - self.requested)))

    def is_left_out(self) -> bool:
        """Return whether the time of the task has passed and no result depends on it."""
        late = time.monotonic() - self.requested >= self.task.seconds
        return late and self.plan_known is not None and self.plan_known.is_set()

    def done(self, outcome: Outcome | None) -> None:
        """Record whether the outcome has a plan."""
        if self.plan_known is not None and outcome is not None and outcome.step_us is not None:
            self.plan_known.set()


_Jobs = SimpleQueue[_Job | None]
_Answers = SimpleQueue[tuple[int, Outcome | None]]


def usable_cores() -> int:
    """Return the number of cores that this process may run on."""
    with contextlib.suppress(AttributeError, OSError):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class Workers:
    """``num_workers`` processes, including this one; use as a context manager."""

    def __init__(self, request: Request, num_workers: int) -> None:
        self.request = request
        self._jobs: _Jobs = SimpleQueue()
        self._answers: _Answers = SimpleQueue()
        self._others: list[_Other] = []
        others = min(num_workers, MAX_WORKERS) - 1
        if others > 0:
            head = json.dumps(to_json(request))
            # An embedded interpreter has no executable of its own: TypeError.
            with contextlib.suppress(OSError, ValueError, TypeError):
                for _ in range(others):
                    self._others.append(_Other(head, self._jobs, self._answers))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for other in self._others:
            other.stop()
        for _ in self._others:
            self._jobs.put(None)

    def perform(self, tasks: Sequence[Task], *, enough: bool | None = None) -> list[Outcome]:
        """Return the outcomes in the order of the tasks. This process works too, alone until another one is ready.

        The longest steps come first, so that no process waits long for another's last task. ``enough``: whether a plan
        is known. From the first known plan on, a task whose time passed before it started is skipped (``timed_out``).
        ``None``: every task is run.
        """
        requested, plan_known = time.monotonic(), None if enough is None else threading.Event()
        if enough and plan_known is not None:
            plan_known.set()
        jobs = [_Job(place, task, requested, plan_known) for place, task in enumerate(tasks)]
        for job in sorted(jobs, key=lambda job: -self._operations(job.task)):
            self._jobs.put(job)
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < len(tasks):
            try:
                next_job = self._jobs.get_nowait()
                assert next_job is not None
                outcomes[next_job.place] = self._here(next_job)
            except Empty:
                with contextlib.suppress(Empty):
                    place, outcome = self._answers.get(timeout=LONGEST_WAIT_S)
                    outcomes[place] = outcome if outcome is not None else self._here(jobs[place])
        return [outcomes[place] for place in range(len(tasks))]

    def _here(self, job: _Job) -> Outcome:
        """Run a task in this process."""
        outcome = Outcome(timed_out=True) if job.is_left_out() else perform(self.request, job.begun_late())
        job.done(outcome)
        return outcome

    def _operations(self, task: Task) -> int:
        """Return the number of forwards and backwards per step in a task's layout."""
        batch = task.batches * self.request.global_batch_size
        return 2 * task.layout.num_virtual_stages * task.layout.num_microbatches(batch)


class _Other:
    """Another process, and the thread that communicates with it."""

    def __init__(self, head: str, jobs: _Jobs, answers: _Answers) -> None:
        root = str(Path(__file__).resolve().parents[3])
        paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
        self._process = LineProcess(["-c", _ENTRY], {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        self._jobs, self._answers = jobs, answers
        threading.Thread(target=self._talk, args=(head,), daemon=True).start()

    def stop(self) -> None:
        self._process.end()

    def _talk(self, head: str) -> None:
        if self._process.ask(head) is None:
            return
        while (job := self._jobs.get()) is not None:
            outcome: Outcome | None = None
            try:
                if job.is_left_out():
                    outcome = Outcome(timed_out=True)
                elif (answer := self._process.ask(json.dumps(to_json(job.begun_late())))) is not None:
                    outcome = from_json(Outcome, json.loads(answer), "answer of a worker")
            except (AutoParallelError, ValueError):
                # The answer cannot be read: this process repeats the work.
                pass
            finally:
                # Always signal completion, so that no caller waits for an answer that never comes.
                job.done(outcome)
                self._answers.put((job.place, outcome))
            if outcome is None:
                return


def serve() -> None:
    """Run the loop of a worker process."""
    request = from_json(Request, json.loads(sys.stdin.readline()), "request")
    with contextlib.suppress(ImportError):
        # Loaded before the first task, which needs it.
        import ortools.sat.python.cp_model  # noqa: F401
    _answer("ready")
    for line in sys.stdin:
        _answer(to_json(perform(request, from_json(Task, json.loads(line), "task"))))


def _answer(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()

"""Several processes, one result: the same plan, verdicts and order, also when a process dies or none can be started."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from dataclasses import replace
from pathlib import Path
from queue import Empty
from types import SimpleNamespace
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel import line_process
from mindspeed_autoparallel.interrupts import ended_like_ctrl_c
from mindspeed_autoparallel.planner.layouts import search as search_module
from mindspeed_autoparallel.planner.layouts import workers as workers_module
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.tasks import SIMPLE, SOLVE, Outcome, Request, Task, perform
from mindspeed_autoparallel.planner.layouts.workers import Workers, usable_cores
from mindspeed_autoparallel.spec import Cluster, Layout, Plan, to_json

CLUSTER = Cluster(num_nodes=2, devices_per_node=4)
LAYOUTS = [Layout(pipeline_size=2, data_size=4), Layout(tensor_size=2, data_size=4), Layout(data_size=8)]


def _request() -> Request:
    return Request(profile=small_profile(), cluster=CLUSTER, global_batch_size=16)


def _tasks() -> list[Task]:
    return [Task(kind=kind, layout=layout, seconds=60.0) for layout in LAYOUTS for kind in (SIMPLE, SOLVE)]


def _without_time(plan: Plan) -> dict[str, Any]:
    value: dict[str, Any] = to_json(plan)
    del value["search"]["seconds"]
    return value


@pytest.fixture
def even_small_searches_in_parallel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search_module, "MANY_OPERATIONS", 0)


def test_another_process_finds_the_same() -> None:
    tasks = _tasks()
    alone = [perform(_request(), task) for task in tasks]
    with Workers(_request(), 2) as workers:
        assert workers.perform(tasks) == alone
        # By now the other process has started: it does its share.
        assert workers.perform(tasks) == alone
    assert any(outcome.step_us is not None for outcome in alone)


def test_a_signal_that_another_thread_receives_ends_the_wait_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system chooses the thread, and a lock that the main thread waits for does not notice."""

    def no_job() -> None:
        raise Empty

    def receive_and_answer_late() -> None:
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        in_time.append(interrupted.wait(20))
        workers._answers.put((0, Outcome(timed_out=True)))

    interrupted, in_time = threading.Event(), list[bool]()
    with Workers(_request(), 1) as workers:
        monkeypatch.setattr(workers, "_jobs", SimpleNamespace(put=lambda job: None, get_nowait=no_job))
        other = threading.Thread(target=receive_and_answer_late)
        with pytest.raises(KeyboardInterrupt), ended_like_ctrl_c():
            other.start()
            workers.perform(_tasks()[:1])
        interrupted.set()
        other.join()
    assert in_time == [True]


@pytest.mark.parametrize(("enough", "done"), [(None, 6), (False, 1), (True, 0)])
def test_late_tasks_are_left_out_once_a_plan_is_known(enough, done, monkeypatch) -> None:
    performed = _counted(monkeypatch)
    late = [replace(task, seconds=0.0) for task in _tasks()]
    with Workers(_request(), 1) as workers:
        outcomes = workers.perform(late, enough=enough)
    assert len(performed) == done
    assert sum(not outcome.timed_out or outcome.step_us is not None for outcome in outcomes) >= done


def test_a_search_whose_time_is_over_tries_one_plan_and_evaluates_no_alternative(monkeypatch) -> None:
    """Where one replay takes a second, every task after the time limit is a second too late."""
    performed = _counted(monkeypatch)
    monkeypatch.setattr(search_module, "FINISH_S", 0.0)
    plan = search(small_profile(), CLUSTER, 16, SearchOptions(time_limit_s=1e-9, num_workers=1, top_k=5))
    assert [task.kind for task in performed] == [SIMPLE]
    assert plan.step.total_us > 0 and not plan.alternatives and plan.search.status == "feasible"


def _counted(monkeypatch: pytest.MonkeyPatch) -> list[Task]:
    """Tasks that are performed from now on."""
    performed: list[Task] = []

    def counting(request: Request, task: Task) -> Outcome:
        performed.append(task)
        return perform(request, task)

    monkeypatch.setattr(workers_module, "perform", counting)
    return performed


def test_the_plan_does_not_depend_on_the_number_of_processes(even_small_searches_in_parallel: None) -> None:
    plans = [search(small_profile(), CLUSTER, 16, SearchOptions(num_workers=number)) for number in (1, 2, 3)]
    assert _without_time(plans[0]) == _without_time(plans[1]) == _without_time(plans[2])


def test_a_process_that_dies_costs_time_only(
    monkeypatch: pytest.MonkeyPatch, even_small_searches_in_parallel: None
) -> None:
    started: list[subprocess.Popen[str]] = []
    popen = subprocess.Popen

    def and_kill(*arguments: Any, **keywords: Any) -> subprocess.Popen[str]:
        started.append(popen(*arguments, **keywords))
        os.kill(started[-1].pid, signal.SIGKILL)
        return started[-1]

    alone = search(small_profile(), CLUSTER, 16, SearchOptions(num_workers=1))
    monkeypatch.setattr(line_process.subprocess, "Popen", and_kill)
    assert _without_time(search(small_profile(), CLUSTER, 16, SearchOptions(num_workers=2))) == _without_time(alone)
    assert started


def test_no_process_at_all_is_no_error(monkeypatch: pytest.MonkeyPatch, even_small_searches_in_parallel: None) -> None:
    def refused(*arguments: Any, **keywords: Any) -> None:
        raise OSError("no more processes")

    monkeypatch.setattr(line_process.subprocess, "Popen", refused)
    assert search(small_profile(), CLUSTER, 16, SearchOptions(num_workers=2)).search.status == "optimal"


def test_a_small_search_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any, **keywords: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(line_process.subprocess, "Popen", refused)
    search(small_profile(), CLUSTER, 16)


def test_no_process_is_left_behind() -> None:
    with Workers(_request(), 3) as workers:
        processes = [other._process for other in workers._others]
        workers.perform(_tasks()[:2])
    assert len(processes) == 2
    assert all(not Path(f"/proc/{process.pid}").exists() for process in processes)


def test_an_error_in_a_task_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(request: Request, task: Task) -> Outcome:
        raise RuntimeError("no answer")

    monkeypatch.setattr("mindspeed_autoparallel.planner.layouts.workers.perform", broken)
    with Workers(_request(), 1) as workers, pytest.raises(RuntimeError, match="no answer"):
        workers.perform(_tasks()[:1])


def test_cores_are_those_of_this_process() -> None:
    assert 1 <= usable_cores() <= (os.cpu_count() or 1)


def test_an_answer_that_cannot_be_read_is_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = _tasks()[:4]
    alone = [perform(_request(), task) for task in tasks]
    ask = line_process.LineProcess.ask
    monkeypatch.setattr(line_process.LineProcess, "ask", lambda self, line: ask(self, line) and "{}}")
    with Workers(_request(), 2) as workers:
        assert [workers.perform(tasks) for _ in range(3)] == [alone] * 3


def test_a_task_that_waits_for_another_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = []

    def slow(_: Request, task: Task) -> Outcome:
        seconds.append(task.seconds)
        time.sleep(0.05)
        return Outcome()

    monkeypatch.setattr(workers_module, "perform", slow)
    with Workers(_request(), 1) as workers:
        workers.perform(_tasks()[:3])
    assert seconds == sorted(seconds, reverse=True)
    assert seconds[0] - seconds[2] >= 0.1

"""A disk that fills up while results are written: the old ones stay whole, and no result lies without its plan."""

from __future__ import annotations

import contextlib

import pytest
from example_plan import example_plan

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.results import PLAN_FILE, RESULT_FILE, result_of, write_results

resource = pytest.importorskip("resource")


@contextlib.contextmanager
def files_of_at_most(num_bytes):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def room_for_the_result_only(plan):
    return len(str(result_of(plan))) + 1000


def test_a_full_disk_leaves_no_result_without_its_plan(tmp_path):
    plan = example_plan()
    assert len(plan.text()) > room_for_the_result_only(plan)
    with (
        files_of_at_most(room_for_the_result_only(plan)),
        pytest.raises(ConfigError, match=rf"{PLAN_FILE}.*Free space"),
    ):
        write_results(plan, tmp_path)
    assert contents(tmp_path) == {}


def test_a_full_disk_leaves_the_results_of_the_run_before(tmp_path):
    write_results(example_plan(), tmp_path)
    before = contents(tmp_path)
    assert set(before) == {PLAN_FILE, RESULT_FILE}
    other = example_plan(global_batch_size=256)
    with files_of_at_most(room_for_the_result_only(other)), pytest.raises(ConfigError):
        write_results(other, tmp_path)
    assert contents(tmp_path) == before

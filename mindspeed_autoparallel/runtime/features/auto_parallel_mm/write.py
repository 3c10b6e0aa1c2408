"""The files of a search: plan, result, page and trace; if encoders have their own layouts, also model.json."""

from __future__ import annotations

import logging

from mindspeed_autoparallel.files import write_json_atomic, write_text_atomic
from mindspeed_autoparallel.planner.hetero.compare import Comparison, summary, write_comparison
from mindspeed_autoparallel.planner.results import PLAN_FILE, PROFILE_FILE, RESULT_FILE, write_results
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.report.page import render_page
from mindspeed_autoparallel.report.replay import chrome_trace
from mindspeed_autoparallel.report.table import render_table
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import training_flags, write_hetero_model
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.spec import Plan

PAGE_FILE = "auto_parallel_report.html"
TRACE_FILE = "auto_parallel_trace.json"
_LOGGER = logging.getLogger(__name__)


def write(request: SearchRequest, found: Plan | Comparison, profile: Profile) -> None:
    """Write the result files of ``found`` to the request's output folder, and print the table.

    ``profile``: the profile of the search, for `replan` and ``--auto-parallel-elastic``.
    """
    directory = request.output_dir
    if isinstance(found, Plan):
        plan, flags = found, f"--auto-parallel-plan {PLAN_FILE}"
        write_results(plan, directory)
    else:
        plan, flags = found.best, _write_both(request, found)
    profile.write(directory / PROFILE_FILE)
    write_text_atomic(directory / PAGE_FILE, render_page(plan, f"flags to add to the script's own: {flags}"))
    write_json_atomic(directory / TRACE_FILE, chrome_trace(plan))
    print(render_table(plan), end="", flush=True)
    _LOGGER.info(f"best plan: {directory / RESULT_FILE}")
    how = f" (train with --auto-parallel-plan {PLAN_FILE})" if plan.hetero is None else ""
    _LOGGER.info(f"full plan: {directory / PLAN_FILE}{how}")
    _LOGGER.info(
        f"page: {directory / PAGE_FILE}; timeline: {directory / TRACE_FILE} (open in Perfetto or chrome://tracing)"
    )


def _write_both(request: SearchRequest, comparison: Comparison) -> str:
    """Write the homogeneous and the hetero plan, and a model.json with the hetero sizes; return the flags to train
    with the better one."""
    model_file = write_hetero_model(comparison.hetero, request.description, request.output_dir)
    write_comparison(comparison, request.output_dir, str(model_file))
    _LOGGER.info(summary(comparison))
    flags = training_flags(comparison.hetero, model_file, request.description)
    _LOGGER.info(f"train the hetero plan with: {flags}")
    return flags if comparison.best.hetero is not None else f"--auto-parallel-plan {PLAN_FILE}"

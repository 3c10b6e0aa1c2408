"""From a profile to the files in the run directory: plan, result, page, trace."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from mindspeed_autoparallel.files import write_json_atomic, write_text_atomic
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.runtime.features.auto_parallel_mm.request import SearchRequest
from mindspeed_autoparallel.spec import Layout, Plan
from mindspeed_autoparallel.spec.cluster import Cluster

RESULT_FILE = "auto_parallel_search_optimal_config.json"
PAGE_FILE = "auto_parallel_report.html"
TRACE_FILE = "auto_parallel_trace.json"
PLAN_FILE = "plan.json"
_LOGGER = logging.getLogger(__name__)


def plan_and_write(request: SearchRequest, profile: Profile) -> None:
    """Search the best plan for the cluster of ``request`` and write everything a user reads to its output folder."""
    from mindspeed_autoparallel.planner.results import write_results
    from mindspeed_autoparallel.report.page import render_page
    from mindspeed_autoparallel.report.spread import text_lines
    from mindspeed_autoparallel.report.table import render_table
    from mindspeed_autoparallel.report.trace import chrome_trace

    cluster, directory = request.cluster, request.output_dir
    _LOGGER.info(
        f"planning for {cluster.num_nodes} x {cluster.devices_per_node} devices, batch {request.global_batch_size}"
    )
    if request.hetero_balance is not None:
        plan = _compared_with_hetero(request, request.hetero_balance, profile, cluster, directory)
    else:
        plan = _for_samples(request, profile)
        write_results(plan, directory)
    write_text_atomic(directory / PAGE_FILE, render_page(plan))
    write_json_atomic(directory / TRACE_FILE, chrome_trace(plan))
    print(render_table(plan) + "\n".join(text_lines(plan)), flush=True)
    _LOGGER.info(f"best plan: {directory / RESULT_FILE}")
    how = f" (train by it with --auto-parallel-plan {PLAN_FILE})" if plan.hetero is None else ""
    _LOGGER.info(f"everything about it: {directory / PLAN_FILE}{how}")
    _LOGGER.info(
        f"page: {directory / PAGE_FILE}; timeline: {directory / TRACE_FILE} (open in Perfetto or chrome://tracing)"
    )


def _for_samples(request: SearchRequest, profile: Profile) -> Plan:
    """Return the best plan for the samples of the request: by their distribution, or all of them equal."""
    if request.sample_data is None:
        return _searched(request, profile, None)
    from mindspeed_autoparallel.planner.spread.choose import choose_plan

    data, options = request.sample_data.distribution, request.sample_data.options
    return choose_plan(profile, data, options, partial(_searched, request))


def _searched(request: SearchRequest, profile: Profile, layouts: list[Layout] | None) -> Plan:
    """Return the best plan under ``profile`` whose split the host runs; ``layouts``: among these."""
    # OR-Tools takes most of a second to load, so only once it is needed.
    from mindspeed_autoparallel.planner.layouts.given_splits import search_given
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions
    from mindspeed_autoparallel.planner.layouts.search import search

    cluster, batch = request.cluster, request.global_batch_size
    options = SearchOptions(time_limit_s=request.time_limit_s, layouts=layouts, with_relaxations=layouts is None)
    if request.splits is not None:
        return search_given(profile, cluster, batch, request.splits, options, progress=_LOGGER.info)
    return search(profile, cluster, batch, options, progress=_LOGGER.info)


def _compared_with_hetero(
    request: SearchRequest,
    balance: str,
    profile: Profile,
    cluster: Cluster,
    directory: Path,
) -> Plan:
    """Search both, write their files and a model.json with the hetero sizes; returns the faster plan."""
    from mindspeed_autoparallel.planner.hetero.compare import compare, summary, write_comparison
    from mindspeed_autoparallel.planner.layouts.options import SearchOptions
    from mindspeed_autoparallel.runtime.features.auto_parallel_mm.hetero_model import (
        can_stage_encoders,
        training_flags,
        write_hetero_model,
    )

    comparison = compare(
        profile,
        cluster,
        request.global_batch_size,
        SearchOptions(time_limit_s=request.time_limit_s),
        progress=_LOGGER.info,
        balance=balance,
        splits=request.splits,
        encoder_pipelines=can_stage_encoders(request.description),
    )
    model_file = write_hetero_model(comparison.hetero, request.description, directory)
    write_comparison(comparison, directory, str(model_file))
    _LOGGER.info(summary(comparison))
    flags = training_flags(comparison.hetero, model_file, request.description)
    _LOGGER.info(f"train the hetero plan with: {flags}")
    return comparison.best

"""``--operator-search`` from the host's parsed arguments to the plan's files; then the process ends."""

from __future__ import annotations

import argparse
import sys

from mindspeed_autoparallel.files import write_json_atomic, write_text_atomic
from mindspeed_autoparallel.interrupts import leaving_kept
from mindspeed_autoparallel.runtime.features.operator_search.request import OperatorRequest, read_request
from mindspeed_autoparallel.runtime.first_rank import is_first_rank

PLAN_FILE, PAGE_FILE = "operator_plan.json", "operator_plan.html"


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Search on rank 0, write the plan and its page, and end every process: training does not start."""
    if is_first_rank():
        request = read_request(arguments)
        with leaving_kept(f"an earlier plan in {request.output_dir} stays"):
            _search(request)
    sys.exit(0)


def _search(request: OperatorRequest) -> None:
    """Search a strategy for every operator, write plan and page, and print the result or the requested operator."""
    # Imported after the request is checked, because these modules load slowly.
    from mindspeed_autoparallel.operators.configured import SearchResult, explain, search_configured
    from mindspeed_autoparallel.operators.presets import decoder_graph
    from mindspeed_autoparallel.report.operator_page import render_operator_page

    work, folder = request.work, request.output_dir
    graph = decoder_graph(work.shape, batch=work.global_batch_size, sequence=work.sequence)
    plan = search_configured(graph, work.devices, request.config, pins=request.pins, pipeline=work.pipeline)
    result = SearchResult(plan, micro_batch_size=work.micro_batch_size)
    write_json_atomic(folder / PLAN_FILE, {**result.as_json(), "model": work.shape.as_json()})
    write_text_atomic(folder / PAGE_FILE, render_operator_page(result.picture()))
    print("\n".join(explain(result.plan, request.explain) if request.explain else result.lines()))
    hint = " (train with --operator-plan)" if result.megatron else ""
    print(f"written: {folder / PLAN_FILE}{hint} and {folder / PAGE_FILE}", flush=True)

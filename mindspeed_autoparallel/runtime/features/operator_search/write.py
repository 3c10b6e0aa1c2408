"""The files of an operator search: the plan and its picture."""

from __future__ import annotations

from mindspeed_autoparallel.files import write_json_atomic, write_text_atomic
from mindspeed_autoparallel.operators.configured import SearchResult, explain
from mindspeed_autoparallel.report.operator_page import render_operator_page
from mindspeed_autoparallel.runtime.features.operator_search.request import OperatorRequest

PLAN_FILE, PAGE_FILE = "operator_plan.json", "operator_plan.html"


def write(request: OperatorRequest, result: SearchResult) -> None:
    """Write plan and page to the request's folder, and print the result or the requested operator."""
    folder = request.output_dir
    write_json_atomic(folder / PLAN_FILE, {**result.as_json(), "model": request.work.shape.as_json()})
    write_text_atomic(folder / PAGE_FILE, render_operator_page(result.picture()))
    print("\n".join(explain(result.plan, request.explain) if request.explain else result.lines()))
    hint = " (train by it with --operator-plan)" if result.megatron else ""
    print(f"written: {folder / PLAN_FILE}{hint} and {folder / PAGE_FILE}", flush=True)

"""Show a plan as a table, a self-contained page, or a trace of the simulated step.

report --plan plan.json --page plan.html   the page, for any browser, without network
report --plan plan.json --trace step.json  for Perfetto or chrome://tracing
report --plan plan.json --text             the table; the default
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plan", type=Path, required=True, help="plan.json")
    add("--page", type=Path, help="write the page here")
    add("--trace", type=Path, help="write the trace of the simulated step here")
    add("--text", action="store_true", help="print the table")
    add("--json", action="store_true", help="print only JSON: everything the page shows")


def run(arguments: argparse.Namespace) -> int:
    from mindspeed_autoparallel.cli._launch import flags_line
    from mindspeed_autoparallel.files import write_text_atomic
    from mindspeed_autoparallel.report import chrome_trace, render_page, render_table, report_data
    from mindspeed_autoparallel.spec.codec import to_json
    from mindspeed_autoparallel.spec.plan import Plan

    plan = Plan.read(arguments.plan)
    if arguments.page:
        write_text_atomic(arguments.page, render_page(plan, flags_line(plan)))
    if arguments.trace:
        write_text_atomic(arguments.trace, json.dumps(chrome_trace(plan), allow_nan=False) + "\n")
    if arguments.json:
        print(json.dumps(to_json(report_data(plan)), allow_nan=False))
        return 0
    if arguments.text or not (arguments.page or arguments.trace):
        print(render_table(plan), end="")
    for what, path in (("page", arguments.page), ("trace", arguments.trace)):
        if path:
            print(f"{what}: {path}")
    return 0

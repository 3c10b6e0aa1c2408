"""``--operator-search`` from the host's parsed arguments to the plan's files; then the process ends."""

from __future__ import annotations

import argparse
import sys

from mindspeed_autoparallel.runtime.features.operator_search.request import read_request
from mindspeed_autoparallel.runtime.first_rank import is_first_rank


def search_and_exit(arguments: argparse.Namespace) -> None:
    """Search on rank 0, write the plan and its picture, and end every process: training does not start."""
    if not is_first_rank():
        sys.exit(0)
    request = read_request(arguments)
    # The planner and the page's writer: only once the request is known to be sound.
    from mindspeed_autoparallel.runtime.features.operator_search.search import search
    from mindspeed_autoparallel.runtime.features.operator_search.source import graph_source
    from mindspeed_autoparallel.runtime.features.operator_search.write import write

    write(request, search(request, graph_source(request)))
    sys.exit(0)

"""A strategy for every operator of a graph, and the Megatron configuration nearest to it."""

from __future__ import annotations

from mindspeed_autoparallel.operators.configured import SearchResult, search_configured
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.runtime.features.operator_search.request import OperatorRequest


def search(request: OperatorRequest, graph: Graph) -> SearchResult:
    """Return the best plan of ``graph`` on the request's devices under its settings and pins."""
    work = request.work
    plan = search_configured(graph, work.devices, request.config, pins=request.pins, pipeline=work.pipeline)
    return SearchResult(plan, micro_batch_size=work.micro_batch_size)

"""The graph of operators that is searched: of the decoder that the script's flags describe."""

from __future__ import annotations

from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.presets import decoder_graph
from mindspeed_autoparallel.runtime.features.operator_search.request import OperatorRequest


def graph_source(request: OperatorRequest) -> Graph:
    """Return the operators of one step of the request's work."""
    work = request.work
    return decoder_graph(work.shape, batch=work.global_batch_size, sequence=work.sequence)

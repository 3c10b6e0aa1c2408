"""Small random operator graphs, the same for a seed."""

import random

from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, pointwise, source


def random_graph(seed):
    """Two to three products and sums over random shapes, with a reused stream."""
    draw = random.Random(seed)
    graph, rows = Graph(), draw.choice([64, 512, 4096, 6])
    width = draw.choice([32, 256, 2048])
    stream = graph.add(source("x", (rows, width)))
    streams = [(stream, width)]
    for number in range(draw.randint(1, 3)):
        given, inner = draw.choice(streams)
        columns = draw.choice([32, 256, 2048, 7])
        weight = graph.add(source(f"w{number}", (inner, columns), parameter=True))
        streams.append((graph.add(matrix_product(f"m{number}", (given, weight), rows, columns, inner)), columns))
        partners = [name for name, width_ in streams[:-1] if width_ == columns and name != "x"]
        if partners and draw.random() < 0.7:
            streams.append(
                (graph.add(pointwise(f"a{number}", (streams[-1][0], partners[0]), (rows, columns))), columns)
            )
    return graph

"""Advice about mem_coeff is right in the whole search, or no value does it: by enumeration over random graphs."""

import random
from dataclasses import replace
from functools import cache

from how_many import how_many

from mindspeed_autoparallel.operators.configured import _choice_at
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, pointwise, source
from mindspeed_autoparallel.operators.search.matmul_cut import advise
from mindspeed_autoparallel.operators.strategies import search_graph


def chain(seed):
    """Products over random sizes, some odd, with sums between them: neighbours' costs take part."""
    draw = random.Random(seed)
    graph, rows = Graph(), draw.choice([4, 6, 32, 64, 512])
    width = draw.choice([1, 3, 4, 8, 32, 64])
    streams = [(graph.add(source("x", (rows, width))), width)]
    for number in range(draw.randint(1, 4)):
        given, inner = draw.choice(streams)
        columns = draw.choice([1, 3, 4, 8, 32, 64])
        weight = graph.add(source(f"w{number}", (inner, columns), parameter=True))
        streams.append((graph.add(matrix_product(f"m{number}", (given, weight), rows, columns, inner)), columns))
        alike = [name for name, other in streams[:-1] if other == columns and name != "x"]
        if alike:
            added = graph.add(pointwise(f"a{number}", (streams[-1][0], alike[0]), (rows, columns)))
            streams.append((added, columns))
    return graph


def test_advised_values_cut_and_where_none_is_advised_none_does():
    advised = refused = 0
    grid = [digits * 10.0**power for power in range(-8, 9) for digits in (1.0, 1.6, 2.5, 4.0, 6.3)]
    for seed in range(how_many(40, 120)):
        graph, mem_coeff = chain(seed), random.Random(seed).choice([1e-4, 0.01, 0.1, 4.0])
        plan = search_graph(graph, 4, mem_coeff=mem_coeff)
        plan = replace(plan, repeat=cache(plan.repeat))
        for entry in plan.explained:
            if entry.costs.choice != "none":
                continue
            choice_at = _choice_at(plan, entry)
            advice = advise(entry.costs, choice_at)
            if advice.mem_coeff is not None:
                advised += 1
                again = search_graph(graph, 4, mem_coeff=advice.mem_coeff)
                taken = next(e for e in again.explained if (e.operator, e.cut) == (entry.operator, entry.cut)).taken
                assert taken == advice.axis != "none", (seed, entry.operator, advice)
            else:
                refused += 1
                assert advice.reason and {choice_at(value) for value in grid} == {"none"}, (seed, entry.operator)
    assert advised > how_many(12, 40) and refused > how_many(6, 20)

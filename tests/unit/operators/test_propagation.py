"""How pinned operators spread: ties in their order, and parameters of several readers in a second pass."""

import random

import numpy
import pytest

from mindspeed_autoparallel.operators import search_graph
from mindspeed_autoparallel.operators.graph.node import NO_CUT, Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, pointwise, source
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.problem import CutProblem, build_problem
from mindspeed_autoparallel.operators.search.propagation import solve_propagation
from mindspeed_autoparallel.operators.search.state import Decisions

ROWS, COLUMNS, INNER = 0, 1, 2


def two_operators(moved, pending):
    """A pinned operator and one that chooses among no cut and three axes at these costs."""
    choices = [NO_CUT, ROWS, COLUMNS, INNER]
    return CutProblem(
        2,
        [["pinned"], ["free"]],
        [[ROWS], choices],
        [numpy.zeros(1), numpy.zeros(4)],
        [numpy.zeros(1), numpy.array(pending)],
        [numpy.zeros(1), numpy.zeros(4)],
        edges={(0, 1): numpy.array([moved])},
    )


@pytest.mark.parametrize(
    ("moved", "pending", "chosen"),
    [
        ([9.0, 9.0, 9.0, 1.0], [0.0, 0.0, 0.0, 7.0], INNER),  # least redistribution, whatever is pending
        ([3.0, 3.0, 3.0, 3.0], [0.0, 4.0, 4.0, 7.0], NO_CUT),  # then least pending
        ([3.0, 3.0, 3.0, 3.0], [4.0, 4.0, 2.0, 2.0], COLUMNS),
        ([3.0, 9.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], COLUMNS),  # then a cut, then the first axis
        ([3.0, 3.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0], ROWS),
    ],
)
def test_ties_are_broken_in_order(moved, pending, chosen):
    problem = two_operators(moved, pending)
    assert problem.choices[1][solve_propagation(problem, {0})[1]] == chosen


def test_pending_sums_count_outputs_and_gradients_of_inputs_but_not_of_parameters():
    graph = Graph()
    x, w = graph.add(source("x", (64, 32))), graph.add(source("w", (32, 16), parameter=True))
    first = graph.add(matrix_product("first", (x, w), 64, 16, 32))
    v = graph.add(source("v", (16, 8), parameter=True))
    graph.add(matrix_product("second", (first, v), 64, 8, 16))
    problem = build_problem(
        Decisions(graph, (), dict.fromkeys(graph.nodes, ())), 2, Machine(link_bytes_per_us=1.0), {}, tied=False
    )
    by_name = dict(zip(graph.nodes, problem.pending_us, strict=True))
    # No cut, rows (only the weight's gradient is pending), columns (the gradient of the input, 64 x 16), inner (output).
    assert by_name["second"].tolist() == [0.0, 0.0, 64 * 16 * 2, 64 * 8 * 2]
    assert by_name["first"].tolist() == [0.0, 0.0, 0.0, 64 * 16 * 2]  # x takes no gradient


def shared(pins):
    """Three products of one 64 x 64 parameter; the readers' own streams are far bigger than the parameter."""
    graph = Graph()
    table = graph.add(source("table", (64, 64), parameter=True))
    for name in ("a", "b", "c"):
        x = graph.add(source(f"x_{name}", (8192, 64)))
        before = graph.add(pointwise(f"before_{name}", (x,), (8192, 64)))
        graph.add(matrix_product(name, (before, table), 8192, 64, 64))
    return search_graph(graph, 2, search_mode="sharding_propagation", pins=pins)


def test_shared_parameter_follows_its_pinned_reader_and_not_the_majority():
    pins = {"before_a": {"columns": 2}, "before_b": {"columns": 2}, "c": {"columns": 2}}
    made = shared(pins).decisions
    # a and b are decided by what they read, cut inside, before c spreads; they want the rows of the table.
    assert [made.choices[name] for name in ("a", "b", "c")] == [(INNER,), (INNER,), (COLUMNS,)]
    assert made.choices["table"] == (1,)


def test_shared_parameters_of_random_graphs_are_best_for_their_readers():
    for seed in range(60):
        draw = random.Random(seed)
        graph, width = Graph(), 64
        weights = [graph.add(source(f"w{n}", (width, width), parameter=True)) for n in range(2)]
        streams = [graph.add(source("x", (draw.choice([32, 64, 512]), width)))]
        rows = graph.nodes["x"].output_shape[0]
        for number in range(draw.randint(3, 6)):
            read = (draw.choice(streams), draw.choice(weights))
            streams.append(graph.add(matrix_product(f"m{number}", read, rows, width, width)))
        pin = {f"m{draw.randint(0, 2)}": draw.choice([ROWS, COLUMNS, INNER])}
        problem = build_problem(Decisions(graph, (), dict.fromkeys(graph.nodes, ())), 2, Machine(), pin, tied=False)
        pinned = {v for v, names in enumerate(problem.members) if names[0] in pin}
        picks = solve_propagation(problem, pinned)
        for v, names in enumerate(problem.members):
            readers = {b for a, b in problem.edges if a == v}
            if not graph.nodes[names[0]].is_parameter or len(readers) < 2:
                continue
            asked = readers & pinned or readers
            costs = [
                sum(float(problem.edges[v, b][choice, picks[b]]) for b in asked)
                for choice in range(len(problem.choices[v]))
            ]
            assert costs[picks[v]] == min(costs), (seed, names)


def test_pinned_readers_that_want_a_shared_parameter_differently_are_named():
    plan = shared({"a": {"inner": 2}, "c": {"columns": 2}})
    (note,) = [note for note in plan.notes if "shared parameter" in note]
    assert "pinned a and c need their shared parameter table" in note
    assert not [note for note in shared({"a": {"columns": 2}, "c": {"columns": 2}}).notes if "shared" in note]

"""Strategies of the products reach the other operators, those of many devices first."""

from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, norm, pointwise, source
from mindspeed_autoparallel.operators.search.fill import fill_rest
from mindspeed_autoparallel.operators.search.state import Decisions


def between(first, second, rows=8):
    """A sum of two products with the strategies given, filled on a 2 x 2 mesh."""
    graph = Graph()
    graph.add(source("x", (rows, 8)))
    for name in ("a", "b"):
        graph.add(source(f"{name}.w", (8, 8), parameter=True))
        graph.add(matrix_product(name, ("x", f"{name}.w"), rows, 8, 8))
    graph.add(pointwise("sum", ("a", "b"), (rows, 8)))
    graph.add(source("w", (8,), parameter=True))
    graph.add(norm("norm", ("sum", "w"), rows, 8))
    start = dict.fromkeys(graph.nodes, (-1, -1)) | {"a": first, "b": second}
    return fill_rest(Decisions(graph, (2, 2), start), {"a", "b"}).choices


def test_strategy_of_more_devices_is_spread_before_that_of_fewer():
    for pair in (((0, -1), (0, 1)), ((0, 1), (0, -1))):
        assert between(*pair)["sum"] == (0, 1)


def test_axes_that_must_not_be_cut_stay_whole():
    assert between((1, 1), (1, 1))["sum"] == (1, 1)
    assert between((1, 1), (1, 1))["norm"] == (-1, -1)
    assert between((0, 1), (0, 1))["norm"] == (0, -1)


def test_indivisible_cut_becomes_one():
    assert between((0, 0), (0, 0), rows=2)["sum"] == (0, -1)


def test_pending_sum_is_not_spread_and_weights_follow_their_product():
    found = between((2, 2), (2, 2))
    assert found["sum"] == (-1, -1) and found["a.w"] == (0, 0) and found["x"] == (1, 1)


def test_look_up_before_tensor_parallel_products_stays_whole():
    plan = search_graph(preset_graph("llama2-7b", batch=4, sequence=64, num_layers=1), 4, mem_coeff=1e6)
    assert plan.dp_mp() == (1, 4) and plan.decisions.choices["embedding"] == (-1, -1)


def test_every_operator_has_a_strategy():
    graph = preset_graph("mixtral-8x7b", batch=8, sequence=64, num_layers=2)
    plan = search_graph(graph, 8)
    assert {len(choice) for choice in plan.decisions.choices.values()} == {3} and set(plan.decisions.choices) == set(
        graph.nodes
    )

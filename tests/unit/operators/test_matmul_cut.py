"""The symbolic cost model gives the published numbers."""

import pytest

from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.node import Graph
from mindspeed_autoparallel.operators.presets import preset_graph
from mindspeed_autoparallel.operators.rules.products import matrix_product, source
from mindspeed_autoparallel.operators.search.matmul_cut import INFEASIBLE, cut_costs
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.recursive import main_neighbours
from mindspeed_autoparallel.operators.strategies import search_graph


def _chain(shapes):
    graph, rows, inner = Graph(), shapes[0][0], shapes[0][1]
    given = graph.add(source("x", (rows, inner)))
    for number, (_, k, j) in enumerate(shapes):
        weight = graph.add(source(f"w{number}", (k, j), parameter=True))
        given = graph.add(matrix_product(f"m{number}", (given, weight), rows, j, k))
    return graph


def test_published_triple_and_threshold_are_exact():
    costs = cut_costs(8192, 1, 4096, 0.01)
    assert costs.total == (20.48, INFEASIBLE, 4096.0, 16.777216)
    assert costs.log_lines()[-1] == "Choose NOT to cut"
    assert costs.threshold == pytest.approx(50 / 4096, rel=1e-12)
    assert cut_costs(8192, 1, 4096, 0.013).choice == "I"


@pytest.mark.parametrize(("mem_coeff", "cut"), [(0.01220, "none"), (0.01221, "I")])
def test_threshold_separates_no_cut_from_cutting_rows(mem_coeff, cut):
    assert cut_costs(8192, 1, 4096, mem_coeff).choice == cut


def test_wide_product_is_cut_by_columns_only():
    assert search_graph(_chain([(160, 320, 3_200_000)]), 8).degrees() == {"m0": {"columns": 8}}


def test_chained_products_are_cut_by_rows():
    plan = search_graph(_chain([(32768, 1024, 1024), (32768, 1024, 1024)]), 8, mem_coeff=0.1)
    assert plan.degrees()["m0"] == {"rows": 8}


def test_product_after_one_pinned_by_columns_is_cut_inside():
    graph = _chain([(32768, 1024, 1024), (32768, 1024, 1024)])
    plan = search_graph(graph, 8, mem_coeff=0.1, pins={"m0": {"columns": 8}})
    assert plan.degrees() == {"m0": {"columns": 8}, "m1": {"inner": 8}}


@pytest.mark.parametrize(
    ("mem_coeff", "dp_mp"), [(0.1, (8, 1)), (1, (8, 1)), (4, (4, 2)), (16, (2, 4)), (1024, (1, 8))]
)
def test_larger_mem_coeff_moves_from_data_to_model_parallel(mem_coeff, dp_mp):
    graph = preset_graph("llama2-7b", batch=12, sequence=2048, num_layers=2)
    assert search_graph(graph, 8, mem_coeff=mem_coeff).dp_mp() == dp_mp


@pytest.mark.parametrize("later", [True, False])
def test_neighbours_are_the_products_that_a_tensor_reaches(later):
    graph = preset_graph("llama2-7b", batch=4, sequence=64, num_layers=3)
    products = [node.name for node in graph.nodes.values() if node.matmul]

    def reached(name):
        """Products whose output arrives in ``name`` through other operators alone, by depth first search."""
        if name in products:
            return {name}
        return {other for source in graph.nodes[name].inputs for other in reached(source)}

    wanted = {name: set() for name in products}
    for name in products:
        for slot, given in enumerate(graph.nodes[name].inputs[:2]):
            wanted[name] |= {(other, slot, 2) for other in reached(given)}
            for other in reached(given) if later else ():
                wanted[other].add((name, 2, slot))
    found = main_neighbours(graph, later=later)
    assert {
        name: {(other, *at) for group, *at in groups for other in group} for name, groups in found.items()
    } == wanted


def test_earlier_neighbours_grow_with_the_layers_and_not_with_their_square():
    graph = preset_graph("llama2-7b", batch=4, sequence=64, num_layers=40)
    assert all(len(groups) <= 2 for groups in main_neighbours(graph, later=False).values())


@pytest.mark.parametrize(("batch", "sequence"), [(1, 512), (2, 4096), (64, 512)])
def test_without_mem_coeff_halvings_come_near_the_exact_plan(batch, sequence):
    graph = preset_graph("llama2-7b", batch=batch, sequence=sequence, num_layers=1)
    by_time, exact = (
        plan_cost(search_graph(graph, 8, **given), Machine()).total_us for given in ({}, {"search_mode": "exact"})
    )
    assert by_time <= 1.5 * exact

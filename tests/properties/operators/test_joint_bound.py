"""All cuts at once: the cost is that of the plan, counts are never dearer, bounds never above the least assignment."""

import itertools
import random

import numpy
import pytest
from random_operator_graphs import random_graph

from mindspeed_autoparallel.operators import preset_graph, search_graph
from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.graph.counted import counted, least_shares
from mindspeed_autoparallel.operators.graph.shortest import all_pairs
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.branch import solve_joint
from mindspeed_autoparallel.operators.search.dual import Dual
from mindspeed_autoparallel.operators.search.joint import all_cut_counts, arranged, build_joint
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.state import Decisions

MACHINE = Machine(flops_per_us=1e6, link_bytes_per_us=1e3)


def problems(graph, mesh, tied=False):
    """Give the problem over counts and the one over all choices."""
    empty, free = Decisions(graph, (), dict.fromkeys(graph.nodes, ())), [{}] * len(mesh)
    none = (None,) * len(mesh)
    every = {name: arranged(node, mesh, none, all_cut_counts(node, mesh, none)) for name, node in graph.nodes.items()}
    counts = build_joint(empty, mesh, MACHINE, free, tied=tied)
    return empty, counts, build_joint(empty, mesh, MACHINE, free, tied=tied, among=every)


@pytest.mark.parametrize("mesh", [(2, 2), (3, 2), (2, 2, 2)])
def test_the_cost_of_all_cuts_is_that_of_the_plan_and_counts_are_never_dearer(mesh):
    for seed in range(12):
        graph, draw = random_graph(seed), random.Random(seed)
        empty, counts, problem = problems(graph, mesh)
        for _ in range(20):
            picks = [draw.randrange(len(choices)) for choices in problem.choices]
            total = problem.total_us(picks)
            plan = OperatorPlan(problem.decisions(empty, picks), "exact", (), 0.0)
            assert total == pytest.approx(plan_cost(plan, MACHINE).total_us, rel=1e-9)
            alike = [
                choices.index(counted(problem.choices[v][p], mesh))
                for v, (p, choices) in enumerate(zip(picks, counts.choices, strict=True))
            ]
            assert counts.total_us(alike) <= total * (1 + 1e-12)


@pytest.mark.parametrize("mesh", [(4,), (2, 2)])
def test_the_least_of_all_assignments_is_found_and_no_bound_is_above_it(mesh):
    tried = 0
    for seed in range(60):
        _, counts, problem = problems(random_graph(seed), mesh)
        if numpy.prod([float(len(choices)) for choices in problem.choices]) > 20_000:
            continue
        tried += 1
        least = min(problem.total_us(list(p)) for p in itertools.product(*(range(len(c)) for c in problem.choices)))
        for stated in (counts, problem):
            dual = Dual(stated)
            dual.raise_bound(least, 40)
            assert dual.bound <= least * (1 + 1e-9)
        solved = solve_joint(problem, numpy.inf, None)
        assert problem.total_us(solved.picks) == pytest.approx(least, rel=1e-9)
        assert solved.bound == pytest.approx(least, rel=1e-9)
    assert tried >= 8


def test_the_share_between_counts_is_never_above_that_between_placements():
    for shape, mesh in (((8, 8), (2, 2, 2)), ((12, 4), (3, 2, 2)), ((8, 4, 2), (2, 2))):
        index, shares = all_pairs(shape, mesh)
        number, least = least_shares(shape, mesh)
        for source, a in index.items():
            for target, b in index.items():
                if -2 not in target:
                    assert least[number[counted(source, mesh)], number[counted(target, mesh)]] <= shares[a, b] + 1e-9


def test_a_tensor_of_many_readers_is_bounded_as_one():
    """Six readers of one tensor pay once: shares of the price would leave a gap of tens of percent."""
    graph = preset_graph("llama2-7b", batch=2, sequence=64, num_layers=1)
    plan = search_graph(graph, 64, search_mode="exact")
    assert plan.bound is not None and plan.bound.gap <= 1e-9
    assert plan.bound.bound_us <= plan.bound.cost_us

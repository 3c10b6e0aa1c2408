"""The exact mode against every assignment of small random graphs; the other modes are never better."""

import itertools
import random

import pytest
from greedy_cuts import solve_greedy
from how_many import how_many
from random_operator_graphs import random_graph

from mindspeed_autoparallel.operators.costs import plan_cost
from mindspeed_autoparallel.operators.plan import OperatorPlan
from mindspeed_autoparallel.operators.search.exact import solve_exact
from mindspeed_autoparallel.operators.search.pricing import Machine
from mindspeed_autoparallel.operators.search.problem import build_problem
from mindspeed_autoparallel.operators.search.propagation import solve_propagation
from mindspeed_autoparallel.operators.search.state import Decisions


def problem_of(graph, parts=2):
    empty = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
    return build_problem(empty, parts, Machine(flops_per_us=1e6), {}, tied=False)


@pytest.mark.parametrize("block", range(8))
def test_exact_equals_brute_force_and_no_mode_is_better(block):
    for seed in range(block * 26, block * 26 + how_many(9, 26)):
        problem = problem_of(random_graph(seed))
        best = min(problem.total_us(list(p)) for p in itertools.product(*(range(len(c)) for c in problem.choices)))
        assert problem.total_us(solve_exact(problem)) == pytest.approx(best, rel=1e-9)
        for picks in (solve_greedy(problem), solve_propagation(problem, {len(problem.members) - 1})):
            assert problem.total_us(picks) >= best * (1 - 1e-9)


def test_the_cost_of_a_cut_is_the_cost_of_the_plan_whose_readers_share():
    machine = Machine(flops_per_us=1e6)
    for seed in range(60):
        graph, draw = random_graph(seed), random.Random(seed)
        decisions = Decisions(graph, (), dict.fromkeys(graph.nodes, ()))
        for _ in range(3):
            problem = build_problem(decisions, 2, machine, {}, tied=False)
            picks = [draw.randrange(len(choices)) for choices in problem.choices]
            decisions = decisions.extend(2, problem.spread(picks))
            plan = OperatorPlan(decisions, "exact", (), 0.0)
            assert problem.total_us(picks) == pytest.approx(plan_cost(plan, machine).total_us, rel=1e-9)

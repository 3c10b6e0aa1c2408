"""Policies of layers: the search against all of them tried."""

import itertools

import pytest
from sharded_profile import drawn_problem

from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering


def brute_force(search):
    """Return the least step of any policies that fit, or None."""
    best = None
    names = list(search.options)
    for chosen in itertools.product(*search.options.values()):
        outcome = search.run(dict(zip(names, chosen, strict=True)))
        if outcome.peak_bytes <= search.limit and (best is None or outcome.step_ns < best):
            best = outcome.step_ns
    return best


def limited(seed):
    """A drawn problem with a limit between what the least and the most memory take."""
    problem, decisions, drawn = drawn_problem(seed)
    lowering = Lowering(problem, decisions)
    search = LayerSearch(lowering, 2**60)
    peaks = [search.run(search.all(policy)).peak_bytes for policy in problem.host.policies]
    search.limit = int(min(peaks) + drawn.random() * 1.05 * (max(peaks) - min(peaks)))
    return search


@pytest.mark.slow
def test_two_hundred_problems_equal_brute_force():
    for seed in range(200):
        search = limited(seed)
        best, found = brute_force(search), search.solve()
        assert (found is None) == (best is None), seed
        bound = step_bound_ns(search.lowering, search.limit)
        assert best is None or (bound is not None and bound <= best), (seed, bound, best)
        bound = search.path_bound_ns(search.run({}))
        assert best is None or (bound is not None and bound <= best), (seed, bound, best)
        if found is not None:
            assert found.bound_ns <= best <= found.replayed.step_ns <= best * 1.0001, seed
            assert found.replayed.peak_bytes <= search.limit

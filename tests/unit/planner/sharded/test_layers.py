"""Policies of layers: the search against all of them tried."""

import itertools
import random
from dataclasses import replace

import pytest
from how_many import how_many
from sharded_profile import decisions_of, drawn_problem, drawn_profile, drawn_sizes

from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.buckets import lowering_of
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.spec.sharded import (
    ALL,
    FIRST,
    KEEP,
    MEGATRON_FSDP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_OFFLOAD,
    VARIANTS,
    ShardingHost,
)


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
def test_drawn_problems_equal_brute_force():
    for seed in range(how_many(80, 200)):
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


def test_a_policy_that_no_layer_can_have_lowers_no_bound():
    """Offload without a link to the host: what exceeds the memory without it is dropped before any replay."""
    dropped = 0
    for seed in range(30):
        search = limited(seed)
        lowering = search.lowering
        least = min(search.run(search.all(policy)).peak_bytes for policy in (KEEP, RECOMPUTE))
        bounds = []
        for policies in ((KEEP, RECOMPUTE), (KEEP, RECOMPUTE, OFFLOAD, RECOMPUTE_OFFLOAD)):
            profile = replace(lowering.profile, host_link_bytes_per_s=0.0)
            problem = Problem(profile, replace(lowering.problem.host, policies=policies), 4)
            bounds.append(step_bound_ns(Lowering(problem, lowering.decisions), int(least * 0.7)))
        assert bounds[0] == bounds[1], seed
        dropped += bounds[1] is None
    assert dropped > 5


AS_MEGATRON_FSDP = {"reentrant": True, "variant": MEGATRON_FSDP}
AS_MEGATRON = {"reentrant": True, "relisted": ("embed", "rotary", "model.layers.{*}", "head")}


@pytest.mark.parametrize(("choice", "more"), [(FIRST, {}), (ALL, {}), (FIRST, AS_MEGATRON), (FIRST, AS_MEGATRON_FSDP)])
def test_a_policy_for_the_first_layers_or_for_all_equals_all_of_them_tried(choice, more):
    for seed in range(25):
        search = limited(seed)
        problem = search.lowering.problem
        host = replace(problem.host, layer_choice=choice, **more)
        lowering = lowering_of(replace(problem, host=host), search.lowering.decisions)
        search = LayerSearch(lowering, search.limit)
        names = list(search.options)
        best = None
        for policy, number in itertools.product(host.policies, range(len(names) + 1)):
            rows = {name: policy for name in names[:number] if policy in search.options[name]}
            outcome = search.run(rows)
            if choice == FIRST or number in (0, len(names)):
                fits = outcome.peak_bytes <= search.limit
                best = outcome.step_ns if fits and (best is None or outcome.step_ns < best) else best
        found = search.solve()
        assert (found is None) == (best is None), seed
        if found is not None:
            assert found.bound_ns <= best <= found.replayed.step_ns, seed
            assert found.replayed.step_ns <= best * (1.01 if choice == FIRST and not more else 1.0), seed
            assert (step_bound_ns(lowering, search.limit) or 0) <= best, seed


def with_experts(seed):
    """Five to twelve layers with experts, which are units of their own where the expert size is 2."""
    drawn = random.Random(seed)
    profile = drawn_profile(drawn, drawn.randint(5, 12), experts=True, points=(CostPoint(), CostPoint(expert_size=2)))
    sizes = drawn_sizes(drawn, drawn.choice((1, 2, 2)))
    switches = {name: drawn.choice((0, 1, 2)) for name in ("forward_prefetch", "backward_prefetch")}
    decisions = decisions_of(profile, sizes, reshard_after_forward=drawn.random() < 0.6, **switches)
    host = ShardingHost(name="drawn", variant=drawn.choice(VARIANTS))
    if host.variant == "mindspeed-mm" and seed % 2:
        decisions = replace(decisions, hooks=("model.layers.{*}",))
    return LayerSearch(Lowering(Problem(profile, host, 4), decisions), 2**60), drawn


def test_no_drawn_policies_are_faster_than_keeping_or_than_the_bounds_of_their_memory():
    for seed in range(how_many(35, 100)):
        search, drawn = with_experts(seed)
        kept = search.run({})
        for _ in range(8):
            share = drawn.random()
            chosen = {name: drawn.choice(row) for name, row in search.options.items() if drawn.random() < share}
            outcome = search.run(chosen)
            assert outcome.step_ns >= kept.step_ns, (seed, chosen)
            search.limit = outcome.peak_bytes
            for bound in (step_bound_ns(search.lowering, search.limit), search.path_bound_ns(kept)):
                assert bound is not None and bound <= outcome.step_ns, (seed, chosen, bound)


@pytest.mark.parametrize(("defers", "stays"), [(True, True), (True, False), (False, True)])
def test_trainers_that_reduce_or_free_once_a_step_equal_brute_force(defers, stays):
    number = how_many(15, 40)
    for seed in range(number):
        problem = limited(seed).lowering.problem
        host = replace(problem.host, defers_reduction=defers, stays_gathered=stays)
        decisions = drawn_problem(seed)[1]
        decisions = replace(decisions, sizes=replace(decisions.sizes, accumulation=2 + seed % 3))
        search = LayerSearch(Lowering(replace(problem, host=host), decisions), 2**60)
        peaks = [search.run(search.all(policy)).peak_bytes for policy in host.policies]
        search.limit = int(min(peaks) + seed / number * (max(peaks) - min(peaks)))
        best, found = brute_force(search), search.solve()
        assert (found is None) == (best is None), seed
        for bound in (step_bound_ns(search.lowering, search.limit), search.path_bound_ns(search.run({}))):
            assert best is None or (bound is not None and bound <= best), (seed, bound, best)
        if found is not None:
            assert found.bound_ns <= best <= found.replayed.step_ns <= best * 1.0001, seed
            assert found.replayed.peak_bytes <= search.limit

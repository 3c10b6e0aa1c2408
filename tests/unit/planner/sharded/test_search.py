"""The search of sharded trainings: sizes, switches and policies together, against all of them tried."""

import itertools
import random
import statistics
from dataclasses import replace

import pytest
from how_many import how_many
from sharded_profile import decisions_of, drawn_problem, drawn_profile, drawn_sizes

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.sharded.bounds import shards_are_small, step_bound_ns, units_bound_ns
from mindspeed_autoparallel.planner.sharded.chain import chain_ns
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.passes import size_bound_ns
from mindspeed_autoparallel.planner.sharded.pricing import policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
from mindspeed_autoparallel.planner.sharded.space import decided, sizes_of, switches_of
from mindspeed_autoparallel.planner.sharded.wrapping import rewrapped, wrappings
from mindspeed_autoparallel.profiles import Collective, LinkTier
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.schedule.sharded import replay
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD, VARIANTS, ShardingHost, ShardSizes
from mindspeed_autoparallel.spec.sharded_plan import ShardedPlan

POINTS = tuple(
    CostPoint(micro_batch_size=micro, expert_size=expert) for micro, expert in itertools.product((1, 2), (1, 2))
)
OPTIONS = ShardedOptions(gap=0.0)


def drawn(seed):
    """A problem on four devices of two nodes, with the limit between the least and the most memory."""
    generator = random.Random(seed)
    profile = drawn_profile(generator, 2, experts=generator.random() < 0.5, points=POINTS)
    host = ShardingHost(
        name="drawn", policies=(KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD), loss_chunks=(0, 256), micro_batch_chunks=(0, 1)
    )
    shipped = decisions_of(profile, ShardSizes(num_devices=4, fully_shard_size=4, micro_batch_size=2))
    shipped = replace(shipped, policies={"model.layers.{*}": (RECOMPUTE, RECOMPUTE)}, chunked=("model.layers.{*}",))
    problem = Problem(profile, host, 2)
    least = priced(problem, shipped, 0).memory.peak_bytes
    most = priced(problem, replace(shipped, policies={}), 0).memory.peak_bytes
    limit = int(least + generator.uniform(-0.1, 1.0) * (most - least))
    return problem, shipped, Cluster(num_nodes=2, devices_per_node=2, memory_limit_bytes=limit)


def brute_force(problem, shipped, cluster):
    """Return the least step of anything that fits, in nanoseconds, or None."""
    best = None
    layers = [module.name for module in problem.profile.modules if module.is_layer]
    for sizes in sizes_of(problem, 4, shipped.sizes.global_batch_size):
        for switches in switches_of(problem, sizes, offload_optimizer=False):
            lowering = Lowering(problem, decided(shipped, problem, sizes, switches))
            choices = [lowering.decisions]
            choices += wrappings(problem, lowering.decisions) if problem.host.lists_units else []
            for decisions in choices:
                step = fastest(Lowering(problem, decisions), cluster.memory_limit_bytes, layers)
                best = step if best is None or (step is not None and step < best) else best
    return best


def fastest(lowering, limit, layers):
    """Return the least step of any policies that fit, in nanoseconds, or None."""
    rows = itertools.product(lowering.problem.host.policies, repeat=len(layers))
    outcomes = [replay(lowering.training(dict(zip(layers, row, strict=True)))) for row in rows]
    return min((outcome.step_ns for outcome in outcomes if outcome.peak_bytes <= limit), default=None)


@pytest.mark.parametrize("seed", range(6))
def test_search_equals_brute_force(seed):
    problem, shipped, cluster = drawn(seed)
    best = brute_force(problem, shipped, cluster)
    if best is None:
        with pytest.raises(InfeasiblePlan, match="nothing fits"):
            search_sharded(problem.profile, cluster, problem.host, shipped, OPTIONS)
        return
    plan = search_sharded(problem.profile, cluster, problem.host, shipped, OPTIONS)
    found = plan.step.total_us * 1000
    assert plan.search.lower_bound_us * 1000 <= best * (1 + 1e-9) and found <= best * 1.002
    assert plan.memory.peak_bytes <= cluster.memory_limit_bytes


def test_plan_is_never_slower_than_shipped_and_reads_back(tmp_path):
    problem, shipped, cluster = drawn(1)
    roomy = replace(cluster, memory_limit_bytes=2**40)
    plan = search_sharded(problem.profile, roomy, problem.host, shipped, OPTIONS)
    before = {outcome.name: outcome for outcome in plan.baselines}
    assert set(before) == {"shipped", "without recomputation", "greedy"}
    assert plan.step.total_us <= min(outcome.step.total_us for outcome in before.values())
    assert plan.decisions.sizes.global_batch_size == shipped.sizes.global_batch_size
    plan.write(tmp_path / "plan.json")
    assert ShardedPlan.read(tmp_path / "plan.json") == plan


def test_policies_by_pattern_name_layers_in_order():
    problem, *_ = drawn(2)
    assert policies_by_pattern(problem, {"model.layers.1": RECOMPUTE}) == {"model.layers.{*}": (KEEP, RECOMPUTE)}


def test_a_micro_batch_in_parts_is_chosen_where_gathers_are_slow_and_memory_is_short():
    generator = random.Random(3)
    points = tuple(CostPoint(micro_batch_size=micro) for micro in (1, 2, 4))
    profile = drawn_profile(generator, 3, points=points)
    slow = LinkTier(default=Collective(latency_us=5, bytes_per_s=2e9))
    device = replace(profile.device, intra=slow, inter=slow)
    host = ShardingHost(name="drawn", policies=(KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD), micro_batch_chunks=(0, 1, 2))
    profile = replace(profile, device=device, host_link_bytes_per_s=2e10)
    sizes = ShardSizes(num_devices=4, fully_shard_size=4, accumulation=4)
    shipped = replace(decisions_of(profile, sizes), chunked=("model.layers.{*}",))
    problem = Problem(profile, host, 2)
    whole = replace(sizes, micro_batch_size=4, accumulation=1)
    rows = {"model.layers.{*}": (RECOMPUTE_OFFLOAD,) * 3}
    parts = priced(problem, replace(shipped, sizes=whole, policies=rows, micro_batch_chunk=1), 2**60)
    at_once = priced(problem, replace(shipped, sizes=whole, policies=rows), 2**60)
    assert parts.memory.peak_bytes < at_once.memory.peak_bytes
    assert parts.step.total_us == pytest.approx(at_once.step.total_us, rel=0.01)
    cluster = Cluster(num_nodes=2, devices_per_node=2, memory_limit_bytes=parts.memory.peak_bytes)
    plan = search_sharded(profile, cluster, host, replace(shipped, policies=rows), OPTIONS)
    assert plan.decisions.micro_batch_chunk and plan.decisions.sizes.micro_batch_size == 4
    assert plan.decisions.policies == rows and plan.step.total_us <= parts.step.total_us


def test_other_modules_are_wrapped_where_that_is_faster():
    """Every set of units beside the layers, at drawn sizes: the best of all tried one by one."""
    better = 0
    for seed in range(20):
        problem, decisions, _ = drawn_problem(seed)
        best = priced(problem, decisions, 2**60)
        found = rewrapped(problem, best, 2**60)
        steps = [best.step.total_us]
        for chosen in itertools.product((True, False), repeat=3):
            left_out = {name for name, kept in zip(("embed", "model", "head"), chosen, strict=True) if not kept}
            groups = tuple(group for group in decisions.groups if group.pattern not in left_out)
            steps.append(priced(problem, replace(decisions, groups=groups), 2**60).step.total_us)
            if problem.profile.num_experts and decisions.sizes.expert_size == 1:
                at = [group.pattern for group in groups].index("model.layers.{*}") + 1
                more = (*groups[:at], replace(groups[0], pattern="model.layers.{*}.experts"), *groups[at:])
                steps.append(priced(problem, replace(decisions, groups=more), 2**60).step.total_us)
        assert (found or best).step.total_us == pytest.approx(min(steps), rel=1e-12), seed
        better += found is not None
    assert better


def test_a_part_of_a_stack_stays_a_unit_inside_a_unit():
    """Trainers call a stack's embedding from outside of it, where the stack's own parameters are not gathered."""
    problem, decisions, _ = drawn_problem(0)
    modules = list(problem.profile.modules)
    embed, at = next(one for one in modules if one.name == "embed"), [one.name for one in modules].index("model")
    modules.insert(at + 1, replace(embed, parent="model"))
    modules.remove(embed)
    inside = Problem(replace(problem.profile, modules=tuple(modules)), problem.host, 4)
    for other in wrappings(inside, decisions):
        units = {group.pattern for group in other.groups}
        assert "embed" in units or "model" not in units
    assert any("embed" not in {group.pattern for group in other.groups} for other in wrappings(problem, decisions))


def test_the_bound_over_units_is_never_above_any_choice_of_them():
    """All units and policies of two layers, with a tower or without, where memory is short and where it is not."""
    shares = []
    for seed in range(how_many(12, 24)):
        generator = random.Random(seed)
        points = (CostPoint(), CostPoint(expert_size=2))
        experts, tower = generator.random() < 0.4, generator.choice((0, 1))
        profile = drawn_profile(generator, 2, experts=experts, points=points, tower=tower)
        sizes = drawn_sizes(generator, 2 if experts and generator.random() < 0.5 else 1)
        switches = {"reshard_after_forward": generator.random() < 0.7, "forward_prefetch": generator.choice((0, 1))}
        host = ShardingHost(name="drawn", policies=(KEEP, RECOMPUTE), variant=VARIANTS[seed % 3])
        problem, decisions = Problem(profile, host, 4), decisions_of(profile, sizes, **switches)
        choices = [Lowering(problem, one) for one in (decisions, *wrappings(problem, decisions))]
        finest, coarsest = (pick(choices, key=lambda one: len(one.units)) for pick in (max, min))
        layers = [module.name for module in profile.modules if module.is_layer]
        most, least = (replay(finest.training(dict.fromkeys(layers, one))).peak_bytes for one in host.policies)
        limit = int(least + generator.uniform(0, 1.2) * (most - least))
        best = min(step for one in choices if (step := fastest(one, limit, layers)) is not None)
        bound = units_bound_ns(finest, coarsest, limit)
        assert bound is not None and bound <= best, (seed, bound, best)
        shares.append(bound / best)
    assert max(shares) > 0.9 and statistics.median(shares) > 0.7


def drawn_lowering(seed):
    """A problem at drawn sizes, some units left out, some hooked at layers; every variant of the rules."""
    generator = random.Random(seed)
    experts, tower = generator.random() < 0.5, generator.choice((0, 1, 3))
    profile = drawn_profile(
        generator, generator.randint(2, 5), experts=experts, points=(CostPoint(), CostPoint(expert_size=2)), tower=tower
    )
    sizes = drawn_sizes(generator, 2 if experts and generator.random() < 0.6 else 1)
    sizes = replace(sizes, fully_shard_size=generator.choice((1, 2, 4, 8)))
    depth = generator.choice((0, 1, 2))
    switches = {"reshard_after_forward": generator.random() < 0.7, "forward_prefetch": depth}
    decisions = decisions_of(profile, sizes, **switches, backward_prefetch=generator.choice((0, depth)))
    groups = [one for one in decisions.groups if one.pattern == "model.layers.{*}" or generator.random() < 0.7]
    hooks = ("model.layers.{*}",) if generator.random() < 0.5 else ()
    problem = Problem(profile, ShardingHost(name="drawn", variant=VARIANTS[seed % 3]), 4)
    return Lowering(problem, replace(decisions, groups=tuple(groups), hooks=hooks))


def test_bounds_that_need_no_replay_are_never_above_the_step():
    """Of sizes, before any units, and of queues alone: exact unless a trainer reduces once a step."""
    for seed in range(150):
        lowering = drawn_lowering(seed)
        step = replay(lowering.training({})).step_ns
        assert chain_ns(lowering) == step, seed
        assert size_bound_ns(lowering.problem, lowering.sizes) <= step, seed
        host = replace(lowering.problem.host, defers_reduction=seed % 3 > 0, stays_gathered=seed % 3 < 2)
        sizes = replace(lowering.sizes, accumulation=2 + seed % 3)
        lowering = Lowering(replace(lowering.problem, host=host), replace(lowering.decisions, sizes=sizes))
        step = replay(lowering.training({})).step_ns
        assert 0.9 * step < chain_ns(lowering) <= step, seed
        for target in (step // 3, step // 2):
            assert target <= chain_ns(lowering, target) <= step, seed


def test_what_exceeds_the_memory_with_the_most_units_fits_with_no_others():
    """The search drops such sizes before it opens their choices of units."""
    dropped, number = 0, how_many(16, 40)
    for seed in range(number):
        problem, decisions, drawn = drawn_problem(seed)
        choices = [Lowering(problem, one) for one in (decisions, *wrappings(problem, decisions))]
        finest = max(choices, key=lambda one: len(one.units))
        layers = [module.name for module in problem.profile.modules if module.is_layer]
        least = min(
            LayerSearch(finest, 2**60).run(dict.fromkeys(layers, one)).peak_bytes for one in problem.host.policies
        )
        search = LayerSearch(finest, int(least * drawn.uniform(0.9, 1.0)))
        if shards_are_small(finest) and not search.may_fit():
            dropped += 1
            assert all(fastest(one, search.limit, layers) is None for one in choices), seed
    assert dropped > number // 4


def test_replicas_sum_gradients_behind_the_backward_in_the_bounds_too():
    """Nothing is gathered, and slow replicas sum each gradient: the bounds come to most of the step."""
    profile = drawn_profile(random.Random(3), 3)
    slow = LinkTier(default=Collective(latency_us=5, bytes_per_s=2e8))
    problem = Problem(
        replace(profile, device=replace(profile.device, intra=slow, inter=slow)), ShardingHost(name="drawn"), 4
    )
    decisions = decisions_of(profile, ShardSizes(num_devices=4, fully_shard_size=1))
    lowering = Lowering(problem, decisions)
    step = replay(lowering.training({})).step_ns
    assert 0.8 * step < units_bound_ns(lowering, lowering, 2**60) <= step_bound_ns(lowering, 2**60) <= step


@pytest.mark.parametrize("seed", [0, 1, 2, pytest.param(3, marks=pytest.mark.long)])
def test_search_with_units_equals_brute_force(seed):
    problem, shipped, cluster = drawn(seed)
    host = replace(
        problem.host, lists_units=True, loss_chunks=(0,), micro_batch_chunks=(0,), prefetch_depths=(0, seed % 2)
    )
    problem = Problem(problem.profile, host, 2)
    best = brute_force(problem, shipped, cluster)
    if best is None:
        with pytest.raises(InfeasiblePlan, match="nothing fits"):
            search_sharded(problem.profile, cluster, host, shipped, OPTIONS)
        return
    plan = search_sharded(problem.profile, cluster, host, shipped, OPTIONS)
    assert plan.search.lower_bound_us * 1000 <= best * (1 + 1e-9) and plan.step.total_us * 1000 <= best * 1.002
    assert plan.search.gap_fraction < 0.002

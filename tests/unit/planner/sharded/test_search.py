"""The search of sharded trainings: sizes, switches and policies together, against all of them tried."""

import itertools
import random
from dataclasses import replace

import pytest
from sharded_profile import decisions_of, drawn_problem, drawn_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.sharded.lowering import Lowering
from mindspeed_autoparallel.planner.sharded.pricing import policies_by_pattern, priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import ShardedOptions, search_sharded
from mindspeed_autoparallel.planner.sharded.space import decided, sizes_of, switches_of
from mindspeed_autoparallel.planner.sharded.wrapping import rewrapped
from mindspeed_autoparallel.profiles import Collective, LinkTier
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.schedule.sharded import replay
from mindspeed_autoparallel.spec.cluster import Cluster
from mindspeed_autoparallel.spec.sharded import KEEP, RECOMPUTE, RECOMPUTE_OFFLOAD, ShardingHost, ShardSizes
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
            for chosen in itertools.product(problem.host.policies, repeat=len(layers)):
                outcome = replay(lowering.training(dict(zip(layers, chosen, strict=True))))
                if outcome.peak_bytes <= cluster.memory_limit_bytes and (best is None or outcome.step_ns < best):
                    best = outcome.step_ns
    return best


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

"""Compare the plan chosen by the distribution with plans by means that train, on three shapes of data.

PYTHONPATH=. python tests/benchmarks/data/plans.py [shape ...]

A plan that runs out of memory has not finished, so the rivals are those of a careful engineer without a distribution:

- *margin*: planned for the mean sample with the memory limit lowered by 5 % steps until the plan is safe (at most 1e-3
  within 10,000 steps, by the same bound). The smallest such margin: it would have to be found by failures.
- *longest*: every sample planned as the longest of the data.

All are scored by the mean of 256 batches that were not drawn while choosing, the same for all: *fresh*.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from shapes import SHAPES
from synthetic_profile import SEQUENCE, synthetic_profile

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.work import SampleSize
from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.spread.choose import choose_plan
from mindspeed_autoparallel.planner.spread.drawn_steps import PlanUnderData
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.memory import out_of_memory
from mindspeed_autoparallel.planner.spread.rank_bytes import rank_bytes
from mindspeed_autoparallel.planner.spread.samples import SpreadOptions
from mindspeed_autoparallel.planner.spread.scaled import mean_profile, scaled_profile
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan

NUM_SAMPLES, BATCH, NUM_FRESH = 20_000, 128, 256
CLUSTER = Cluster(num_nodes=4, devices_per_node=16)
OPTIONS = SpreadOptions()


def searched(profile: Profile, layouts: list[Layout] | None, cluster: Cluster = CLUSTER) -> Plan:
    space = SpaceOptions(virtual_sizes=(1,))
    return search(
        profile, cluster, BATCH, SearchOptions(layouts=layouts, space=space, with_relaxations=False, num_workers=1)
    )


def share_of_failing_steps(profile: Profile, plan: Plan, data: Distribution, number: int = 200) -> float:
    """Return how many of ``number`` drawn steps of ``plan`` need more memory than there is, by the same formula."""
    factors = sample_factors(profile, data)
    ranks, generator = rank_bytes(profile, plan), numpy.random.default_rng(3)
    layout = plan.layout
    shape = (layout.data_size, plan.num_microbatches, layout.micro_batch_size)
    failing = 0
    for _ in range(number):
        rows = data.sizes()[generator.choice(len(data.rows), shape, p=data.shares())]
        held = [factors.of(replica)[1] for replica in rows]
        failing += any(rank.peak(replica) > rank.limit for rank in ranks for replica in held)
    return failing / number


def with_margin(profile: Profile, data: Distribution) -> tuple[Plan, int]:
    """Return the plan by means with the smallest margin of memory that makes it safe, and the margin in percent."""
    factors = sample_factors(profile, data)
    capacity = profile.device.memory_capacity_bytes
    for margin in range(0, 100, 5):
        limited = replace(CLUSTER, memory_limit_bytes=round(capacity * (100 - margin) / 100))
        try:
            plan = searched(mean_profile(profile, data, factors), None, limited)
        except InfeasiblePlan:
            break
        whole = replace(plan, cluster=CLUSTER)
        if out_of_memory(profile, whole, data, factors, OPTIONS.oom_steps).probability <= OPTIONS.max_oom_probability:
            return whole, margin
    raise InfeasiblePlan("no margin makes the plan by means safe.")


def for_the_longest(profile: Profile, data: Distribution) -> Plan:
    """Return the plan for samples that are all as long, with as many patches, as the largest."""
    factors = sample_factors(profile, data)
    names = [module.name for module in profile.model.modules]
    times, sizes = (one.max(axis=0) for one in factors.of(data.sizes()[:, None, :]))
    scales = (dict(zip(names, times.tolist(), strict=True)), dict(zip(names, sizes.tolist(), strict=True)))
    return searched(scaled_profile(profile, {1: scales, 2: scales}), None)


def fresh(profile: Profile, plan: Plan, data: Distribution) -> tuple[numpy.ndarray, numpy.ndarray]:
    """Return steps in seconds, in order and rearranged, of batches that nothing was chosen by."""
    factors = sample_factors(profile, data)
    under = PlanUnderData(profile, plan, factors)
    drawn = under.drawn(data, NUM_FRESH, seed=7)
    return drawn.in_order / 1e6, drawn.balanced / 1e6


def main() -> None:
    """Print one row per shape, in the order of the data and rearranged."""
    profile = synthetic_profile()
    print(
        "| data | plan by means: fresh, failing steps | margin: fresh | longest: fresh | chosen: fresh, P95, out of memory | against the better rival | s |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for name, draw in SHAPES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        sizes = draw(NUM_SAMPLES, 0)
        sizes[:, 0] = numpy.minimum(sizes[:, 0], SEQUENCE)
        source = DataSource(
            kind="records", files=(name,), sha256="", tokens_by="given", num_records=NUM_SAMPLES, num_read=NUM_SAMPLES
        )
        data = make_distribution(source, [SampleSize(*map(int, row)) for row in sizes])
        by_means = searched(mean_profile(profile, data, sample_factors(profile, data)), None)
        failing = share_of_failing_steps(profile, by_means, data)
        margin_plan, margin = with_margin(profile, data)
        longest = for_the_longest(profile, data)
        for is_balanced in (False, True):
            began = time.process_time()
            plan = choose_plan(profile, data, replace(OPTIONS, is_balanced=is_balanced), searched)
            took = time.process_time() - began
            assert plan.data is not None
            steps = {
                key: fresh(profile, one, data)[is_balanced]
                for key, one in (("means", by_means), ("margin", margin_plan), ("longest", longest), ("chosen", plan))
            }
            rival = min(("margin", "longest"), key=lambda key: steps[key].mean())
            difference = steps["chosen"] / steps[rival].mean() - steps[rival] / steps[rival].mean()
            error = difference.std() / (NUM_FRESH - 1) ** 0.5
            print(
                f"| {name}{', rearranged' * is_balanced} | {label(by_means)}: {steps['means'].mean():.2f}, {failing:.3f} | "
                f"{margin} %, {label(margin_plan)}: {steps['margin'].mean():.2f} | {label(longest)}: "
                f"{steps['longest'].mean():.2f} | {label(plan)}: {steps['chosen'].mean():.2f}, "
                f"{numpy.quantile(steps['chosen'], 0.95):.2f}, {plan.data.oom_probability:.2g} | "
                f"{100 * difference.mean():+.1f} % +- {100 * error:.1f} | {took:.0f} |",
                flush=True,
            )


def label(plan: Plan) -> str:
    """Return the layout and how many layers are recomputed."""
    recomputed = sum(sum(plan.recomputed_of(module.name)) for module in plan.model.modules)
    return f"{plan.layout.label()}, {recomputed} recomputed"


if __name__ == "__main__":
    main()

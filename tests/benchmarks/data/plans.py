"""Compare the plan chosen by the distribution with the plan by means, on three shapes of data.

PYTHONPATH=. python tests/benchmarks/data/plans.py [shape ...]
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from shapes import SHAPES
from synthetic_profile import SEQUENCE, synthetic_profile

from mindspeed_autoparallel.data.distribution import DataSource, Distribution, make_distribution
from mindspeed_autoparallel.data.sample import SampleSize
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.spread.choose import SpreadOptions, choose_plan, mean_profile
from mindspeed_autoparallel.planner.spread.factors import sample_factors
from mindspeed_autoparallel.planner.spread.memory import rank_bytes
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Plan

NUM_SAMPLES, BATCH = 20_000, 128


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


def main() -> None:
    """Print one row per shape."""
    profile, cluster = synthetic_profile(), Cluster(num_nodes=4, devices_per_node=16)

    def searched(one, layouts):
        options = SpaceOptions(virtual_sizes=(1,))
        return search(
            one, cluster, BATCH, SearchOptions(layouts=layouts, space=options, with_relaxations=False, num_workers=1)
        )

    print(
        "| data | plan by means: said, drawn, out of memory, share of steps | chosen: drawn, P95, out of memory | rearranged | packed |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, draw in SHAPES.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        sizes = draw(NUM_SAMPLES, 0)
        sizes[:, 0] = numpy.minimum(sizes[:, 0], SEQUENCE)
        source = DataSource(
            kind="records", files=(name,), sha256="", tokens_by="given", num_records=NUM_SAMPLES, num_read=NUM_SAMPLES
        )
        data = make_distribution(source, [SampleSize(*map(int, row)) for row in sizes])
        plan = choose_plan(profile, data, SpreadOptions(), searched)
        assert plan.data is not None
        record = plan.data
        means = min(record.considered, key=lambda one: one.by_means_us)
        by_means = searched(mean_profile(profile, data, sample_factors(profile, data)), None)
        failing = share_of_failing_steps(profile, by_means, data)
        print(
            f"| {name} | {means.label}: {means.by_means_us / 1e6:.2f} s, {means.mean_us / 1e6:.2f} s, "
            f"{means.oom_probability:.2g}, {failing:.3f} | {plan.layout.label()}: {record.mean_us / 1e6:.2f} s "
            f"+- {record.mean_error_us / 1e6:.2f}, {record.p95_us / 1e6:.2f} s, {record.oom_probability:.2g} | {record.balanced_mean_us / 1e6:.2f} s | "
            f"{record.packed_mean_us / 1e6:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()

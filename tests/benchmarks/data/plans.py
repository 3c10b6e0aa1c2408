"""Compare the plan chosen by the distribution with the plan by means, on three shapes of data.

PYTHONPATH=. python tests/benchmarks/data/plans.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "plan"))
from shapes import SHAPES
from synthetic_profile import SEQUENCE, synthetic_profile

from mindspeed_autoparallel.data.distribution import DataSource, make_distribution
from mindspeed_autoparallel.data.sample import SampleSize
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.spread.choose import SpreadOptions, choose_plan
from mindspeed_autoparallel.spec import Cluster

NUM_SAMPLES, BATCH = 20_000, 128


def main() -> None:
    """Print one row per shape."""
    profile, cluster = synthetic_profile(), Cluster(num_nodes=4, devices_per_node=16)

    def searched(one, layouts):
        options = SpaceOptions(virtual_sizes=(1,))
        return search(one, cluster, BATCH, layouts=layouts, options=options, with_relaxations=False, num_workers=1)

    print(
        "| data | plan by means: said, drawn, out of memory | chosen: drawn, P95, out of memory | rearranged | packed |"
    )
    print("| --- | --- | --- | --- | --- |")
    for name, draw in SHAPES.items():
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
        print(
            f"| {name} | {means.label}: {means.by_means_us / 1e6:.2f} s, {means.mean_us / 1e6:.2f} s, "
            f"{means.oom_probability:.2g} | {plan.layout.label()}: {record.mean_us / 1e6:.2f} s, "
            f"{record.p95_us / 1e6:.2f} s, {record.oom_probability:.2g} | {record.balanced_mean_us / 1e6:.2f} s | "
            f"{record.packed_mean_us / 1e6:.2f} s |",
            flush=True,
        )


if __name__ == "__main__":
    main()

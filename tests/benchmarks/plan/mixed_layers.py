"""Plans of profiles with layers of several kinds beside every split and recomputation, by the exact peak.

python tests/benchmarks/plan/mixed_layers.py --profiles 60

The profiles and the enumeration are those of tests/properties/planner/test_layers_of_kinds.py.
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[3] / "tests" / "properties" / "planner"))
from test_layers_of_kinds import BATCH, LAYOUTS, NAME, best_of_all, mixed_profile

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult, solve_layout
from mindspeed_autoparallel.planner.layouts.options import SolveOptions
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout


def planned(profile: Profile, layout: Layout) -> LayoutResult:
    cluster = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size)
    (measurement,) = profile.measurements
    candidate = Candidate(
        profile=profile, cluster=cluster, layout=layout, measurement=measurement, num_microbatches=BATCH
    )
    return solve_layout(candidate, SolveOptions(time_limit_s=60))


def by_mean_layer(profile: Profile, layout: Layout) -> float | None:
    """What the plan for the mean layer takes with the layers as they are; ``None`` where it does not fit."""
    (measurement,) = profile.measurements
    mean = replace(measurement.modules[NAME], kinds=(), pattern=())
    result = planned(replace(profile, measurements=(replace(measurement, modules={NAME: mean}),)), layout)
    if result.evaluation is None:
        return None
    cluster = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size)
    found = evaluate(profile, cluster, layout, result.evaluation.placement, BATCH, with_timeline=False)
    return found.step.total_us if found.fits else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=60)
    number = parser.parse_args().profiles
    for layout in LAYOUTS:
        drawn = random.Random(layout.label())
        gaps, mean_gaps, num_unfit, num_wrong, above = [], [], 0, 0, 0
        for _ in range(number):
            state_mib = 27_000 // layout.pipeline_size
            profile = mixed_profile(drawn, state_mib + drawn.choice([500, 1_200, 2_000, 3_000, 5_000]))
            best, result = best_of_all(profile, layout), planned(profile, layout)
            num_wrong += (best is None) != (result.evaluation is None)
            if best is None or result.evaluation is None:
                continue
            above += result.lower_bound_us > best * (1 + 1e-6)
            gaps.append(result.evaluation.step.total_us / best - 1)
            mean = by_mean_layer(profile, layout)
            num_unfit += mean is None
            if mean is not None:
                mean_gaps.append(mean / best - 1)
        missed = [gap for gap in gaps if gap > 1e-6]
        print(
            f"{layout.label()}: {len(gaps)} of {number} fit ({num_wrong} judged wrongly), {above} bounds too high, not "
            f"the best {len(missed)} (worst {max(gaps):.2%}); planned by the mean layer: {num_unfit} do not fit, the "
            f"others {sum(mean_gaps) / len(mean_gaps):.1%} slower (worst {max(mean_gaps):.1%})"
        )


if __name__ == "__main__":
    main()

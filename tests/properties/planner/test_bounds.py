"""No placement beats a bound of the outer search."""

from __future__ import annotations

from itertools import combinations, pairwise

from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_profile import small_profile

from mindspeed_autoparallel.planner.bounds import whole_layers_bound
from mindspeed_autoparallel.planner.search import search
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.spec import Cluster, Layout


@settings(max_examples=300, deadline=None)
@given(
    layers=st.integers(1, 9), stages=st.integers(1, 5), microbatches=st.integers(1, 9), forward=st.integers(1, 3),
    backward=st.integers(1, 6),
)  # fmt: skip
@example(layers=6, stages=2, microbatches=2, forward=1, backward=1)  # the first rank may hold more than its share
def test_no_split_of_whole_layers_beats_their_bound(
    layers: int, stages: int, microbatches: int, forward: int, backward: int
) -> None:
    stages = min(stages, layers)
    bound = whole_layers_bound(layers, stages, microbatches) * (forward + backward)
    program = make_program("1f1b", stages, microbatches)
    for cuts in combinations(range(1, layers), stages - 1):
        edges = (0, *cuts, layers)
        counts = [b - a for a, b in pairwise(edges)]
        times = StepTimes(forward=[forward * n for n in counts], backward=[backward * n for n in counts])
        assert simulate(program, times).step_time >= bound


@settings(max_examples=15, deadline=None)
@given(capacity=st.integers(150, 900), batch=st.sampled_from([2, 4, 8, 16]), stages=st.sampled_from([1, 2, 4]))
def test_plan_fits_is_no_faster_than_its_bound_and_no_slower_than_simple_splits(
    capacity: int, batch: int, stages: int
) -> None:
    from mindspeed_autoparallel.errors import InfeasiblePlan

    profile = small_profile(capacity_mib=capacity)
    try:
        plan = search(
            profile, Cluster(num_nodes=1, devices_per_node=stages), batch, layouts=[Layout(pipeline_size=stages)],
            with_relaxations=False,
        )  # fmt: skip
    except InfeasiblePlan:
        return
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)
    assert plan.search.lower_bound_us <= plan.step.total_us * (1 + 1e-9)
    for baseline in plan.baselines:
        if baseline.feasible and baseline.step_us is not None:
            assert plan.step.total_us <= baseline.step_us * (1 + 1e-9)

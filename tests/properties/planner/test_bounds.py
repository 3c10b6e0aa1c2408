"""No placement beats a bound of the outer search."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf

from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_profile import small_profile

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.bounds import pipeline_bound_ns, whole_layers_bound
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.rank_bounds import moments_in_flight, rank_bound_us
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.device import StageOverhead
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.spec import Cluster, Layout


@settings(max_examples=300, deadline=None)
@given(
    layers=st.integers(1, 9),
    stages=st.integers(1, 5),
    microbatches=st.integers(1, 9),
    forward=st.integers(1, 3),
    backward=st.integers(1, 6),
)
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


_HOST_US = st.sampled_from([0.0, 7.0, 300.0, 2000.0])


@settings(max_examples=20, deadline=None)
@given(
    stages=st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2)]),
    microbatches=st.integers(1, 4),
    operation=_HOST_US,
    first=_HOST_US,
    inner=_HOST_US,
    last=_HOST_US,
)
def test_no_placement_beats_its_bound_however_long_the_host_takes_beside_blocks(
    stages: tuple[int, int], microbatches: int, operation: float, first: float, inner: float, last: float
) -> None:
    size, chunks = stages
    microbatches *= size if chunks > 1 else 1
    profile = small_profile()
    beside = StageOverhead(first_us=first, inner_us=inner, last_us=last)
    profile = replace(profile, device=replace(profile.device, operation_overhead_us=operation, stage_overhead=beside))
    layout = Layout(pipeline_size=size, virtual_size=chunks, schedule="interleaved" if chunks > 1 else "1f1b")
    measurement = profile.at(MeasuredAt())
    assert measurement is not None
    cluster = Cluster(num_nodes=1, devices_per_node=size)
    candidate = Candidate(
        profile=profile, cluster=cluster, layout=layout, measurement=measurement, num_microbatches=microbatches
    )
    bound_us = pipeline_bound_ns(candidate) / NS_PER_US
    times = []
    sizes = [module.num_layers for module in profile.model.modules]
    for cuts in combinations(range(1, sum(sizes)), size * chunks - 1):
        edges = (0, *cuts, sum(sizes))
        layers = {
            module.name: tuple(_overlap(a, b, sum(sizes[:index]), sizes[index]) for a, b in pairwise(edges))
            for index, module in enumerate(profile.model.modules)
        }
        found = evaluate(
            profile, cluster, layout, ModulePlacement(layers=layers, recompute={}), microbatches, with_timeline=False
        )
        times.append(found.step.pipeline_us)
    assert bound_us <= min(times) * (1 + 1e-9)
    if size == 1:
        assert bound_us >= times[0] * (1 - 1e-9)


def _overlap(begin: int, end: int, start: int, length: int) -> int:
    """Of the range from ``begin`` to ``end``, how much lies in the ``length`` from ``start`` on."""
    return max(0, min(end, start + length) - max(begin, start))


@settings(max_examples=15, deadline=None)
@given(capacity=st.integers(150, 900), batch=st.sampled_from([2, 4, 8, 16]), stages=st.sampled_from([1, 2, 4]))
def test_plan_fits_is_no_faster_than_its_bound_and_no_slower_than_simple_splits(
    capacity: int, batch: int, stages: int
) -> None:
    from mindspeed_autoparallel.errors import InfeasiblePlan

    profile = small_profile(capacity_mib=capacity)
    try:
        plan = search(
            profile,
            Cluster(num_nodes=1, devices_per_node=stages),
            batch,
            SearchOptions(layouts=[Layout(pipeline_size=stages)], with_relaxations=False),
        )
    except InfeasiblePlan:
        return
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)
    assert plan.search.lower_bound_us <= plan.step.total_us * (1 + 1e-9)
    for baseline in plan.baselines:
        if baseline.feasible and baseline.step_us is not None:
            assert plan.step.total_us <= baseline.step_us * (1 + 1e-9)


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 5), chunks=st.integers(1, 4), rounds=st.integers(1, 4), longer=st.integers(0, 3))
def test_moments_of_ranks_are_moments_of_the_schedule(size: int, chunks: int, rounds: int, longer: int) -> None:
    count = size * rounds + longer
    interleaved = chunks > 1 and size > 1
    group = size + longer if interleaved else 0
    if interleaved and (group > count or 0 < count % group < size):
        return
    layout = Layout(
        pipeline_size=size,
        virtual_size=chunks if interleaved else 1,
        schedule="interleaved" if interleaved else "1f1b",
        microbatch_group_size=group,
    )
    program = make_program(*layout.program_sizes(count))
    for rank, actions in enumerate(program):
        now, reached = [0] * layout.virtual_size, set()
        for action in actions:
            now[action.chunk] += 1 if action.kind == "F" else -1
            reached.add(tuple(now))
        assert set(moments_in_flight(layout, count, rank)) <= reached


_SIZES = st.sampled_from([(1, 1, 1), (1, 1, 4), (2, 1, 2), (2, 1, 5), (3, 1, 4), (2, 2, 2), (2, 2, 4), (2, 2, 5)])


@settings(max_examples=25, deadline=None)
@given(sizes=_SIZES, capacity=st.integers(150, 600), both=st.booleans(), alone=st.booleans(), host_us=_HOST_US)
def test_no_plan_that_fits_beats_what_its_ranks_allow(
    sizes: tuple[int, int, int], capacity: int, both: bool, alone: bool, host_us: float
) -> None:
    size, chunks, microbatches = sizes
    profile = small_profile(capacity_mib=capacity)
    profile = replace(profile, device=replace(profile.device, operation_overhead_us=host_us))
    if not both:
        module = replace(profile.model.modules[1], predecessors=())
        points = [replace(at, modules={module.name: at.modules[module.name]}) for at in profile.measurements]
        profile = replace(profile, model=replace(profile.model, modules=(module,)), measurements=tuple(points))
    layout = Layout(
        pipeline_size=size,
        virtual_size=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        microbatch_group_size=(microbatches if microbatches % size else 0) if chunks > 1 else 0,
        standalone_ends=alone and not both,
    )
    measurement = profile.at(MeasuredAt())
    assert measurement is not None
    cluster = Cluster(num_nodes=1, devices_per_node=size)
    candidate = Candidate(
        profile=profile, cluster=cluster, layout=layout, measurement=measurement, num_microbatches=microbatches
    )
    bound_us = rank_bound_us(candidate)
    counts = [module.num_layers for module in profile.model.modules]
    num, total = size * chunks, sum(counts)
    least_us = inf
    for cuts in combinations(range(total + 1), num - 1):
        edges = (0, *cuts, total)
        held = [b - a for a, b in pairwise(edges)]
        if any(n == 0 and not (layout.standalone_ends and v in (0, num - 1)) for v, n in enumerate(held)):
            continue
        layers = {
            module.name: tuple(_overlap(a, b, sum(counts[:index]), counts[index]) for a, b in pairwise(edges))
            for index, module in enumerate(profile.model.modules)
        }
        # The decoder's alone: more kinds of plans than these are not needed to beat a bound that is too high.
        for again in product(*(range(n + 1) for n in layers["text_decoder"])):
            recompute = {name: {"full": row} for name, row in layers.items()} | {"text_decoder": {"full": again}}
            placement = ModulePlacement(layers=layers, recompute=recompute)
            found = evaluate(profile, cluster, layout, placement, microbatches, with_timeline=False)
            if found.fits:
                least_us = min(least_us, found.step.pipeline_us)
    assert bound_us <= least_us
    if size == 1 and capacity > 550 and not both:
        assert bound_us >= least_us * (1 - 1e-5), "one rank with memory to spare has one price"

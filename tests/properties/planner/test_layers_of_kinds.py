"""Profiles with layers of several kinds: the plan is the best of every split and recomputation, by the exact peak."""

import itertools
import random
from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate, evaluated
from mindspeed_autoparallel.planner.layouts.layout_solver import solve_layout
from mindspeed_autoparallel.planner.layouts.options import SearchOptions, SolveOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.rank_memory import fits_rank
from mindspeed_autoparallel.planner.split.bounds.relaxation import relaxed_cuts
from mindspeed_autoparallel.profiles import mean_layer
from mindspeed_autoparallel.spec import Cluster, Layout

NAME, BATCH = "text_decoder", 6
PATTERNS = [(0, 0, 1, 1, 1, 1), (0, 1, 0, 1, 0, 1), (1, 1, 1, 1, 1, 0), (0, 1, 2, 2, 1, 0)]
LAYOUTS = [
    Layout(pipeline_size=2),
    Layout(pipeline_size=3),
    Layout(pipeline_size=2, virtual_size=2, schedule="interleaved"),
]


def mixed_profile(drawn, capacity_mib):
    pattern = drawn.choice(PATTERNS)
    profile = language_profile(num_layers=len(pattern), capacity_mib=capacity_mib, tensor=(1,), batches=(1,))

    def kind_of(layer):
        work, size = drawn.choice([0.4, 1.0, 2.5]), drawn.choice([0.5, 1.0, 2.0])
        again = {
            "none": replace(layer.recompute["none"], saved_bytes=round(size * layer.recompute["none"].saved_bytes)),
            "full": replace(
                layer.recompute["full"],
                extra_backward_us=work * layer.forward_us,
                backward_peak_bytes=round(size * layer.recompute["full"].backward_peak_bytes),
            ),
        }
        if use_selective:
            again["selective"] = replace(
                layer.recompute["selective"],
                extra_backward_us=drawn.uniform(0.05, 0.5) * layer.forward_us,
                saved_bytes=round(drawn.uniform(0.3, 0.8) * again["none"].saved_bytes),
            )
        return replace(layer, forward_us=work * layer.forward_us, backward_us=work * layer.backward_us, recompute=again)

    use_selective = drawn.random() < 0.3
    (measurement,) = profile.measurements
    module = measurement.modules[NAME]
    kinds = tuple(kind_of(module.layer) for _ in set(pattern))
    mixed = replace(module, layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)
    return replace(profile, measurements=(replace(measurement, modules={NAME: mixed}),))


def candidate_of(profile, layout):
    """Return the layout with the profile's only point."""
    cluster, (measurement,) = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size), profile.measurements
    return Candidate(profile=profile, cluster=cluster, layout=layout, measurement=measurement, num_microbatches=BATCH)


def best_of_all(profile, layout):
    """Of every split: on each stage the way that adds least of those whose exact peak fits, chunks together."""
    candidate = candidate_of(profile, layout)
    cost, num = profile.measurements[0].modules[NAME], layout.num_virtual_stages
    ways = [way for way in ("full", "selective") if way in cost.layer.recompute]
    best = None
    for cut in itertools.combinations(range(1, len(cost.pattern)), num - 1):
        edges = [0, *cut, len(cost.pattern)]
        layers = tuple(high - low for low, high in itertools.pairwise(edges))
        chosen = []
        for rank in range(layout.pipeline_size):
            options = []
            chunks = range(rank, num, layout.pipeline_size)
            numbers = [
                [row for row in itertools.product(range(layers[v] + 1), repeat=len(ways)) if sum(row) <= layers[v]]
                for v in chunks
            ]
            for rows in itertools.product(*numbers):
                recompute = {way: [0] * num for way in ways}
                added = []
                for v, row in zip(chunks, rows, strict=True):
                    place, extra = edges[v], 0.0
                    for way, count in zip(ways, row, strict=True):
                        recompute[way][v] = count
                        extra += sum(
                            layer.recompute[way].extra_backward_us * held for layer, held in cost.runs(place, count)
                        )
                        place += count
                    added.append(extra)
                placement = ModulePlacement(layers={NAME: layers}, recompute={NAME: recompute})
                if fits_rank(candidate, placement, rank):
                    options.append((tuple(added), recompute))
            # More of every chunk is never faster.
            chosen.append(
                [
                    way
                    for extra, way in options
                    if not any(o != extra and all(a <= b for a, b in zip(o, extra, strict=True)) for o, _ in options)
                ]
            )
        for rows in itertools.product(*chosen):
            recompute = {way: tuple(sum(row[way][v] for row in rows) for v in range(num)) for way in ways}
            placement = ModulePlacement(layers={NAME: layers}, recompute={NAME: recompute})
            found = evaluated(candidate, placement)
            assert found.fits
            best = found.step.total_us if best is None else min(best, found.step.total_us)
    return best


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.label())
def test_the_plan_is_the_best_of_every_split_and_its_bound_holds(layout):
    drawn = random.Random(layout.label())
    planned = proved = 0
    for _ in range(12):
        state_mib = 27_000 // layout.pipeline_size
        profile = mixed_profile(drawn, state_mib + drawn.choice([500, 1_200, 2_000, 3_000, 5_000]))
        expected = best_of_all(profile, layout)
        candidate = candidate_of(profile, layout)
        result = solve_layout(candidate, SolveOptions(time_limit_s=60))
        if expected is None:
            assert result.evaluation is None
            continue
        # Proved, whatever was found.
        assert result.lower_bound_us <= expected * (1 + 1e-6)
        assert result.evaluation is not None
        found = result.evaluation.step.total_us
        assert found >= expected * (1 - 1e-9)
        planned += 1
        proved += found <= expected * (1 + 1e-6)
        problem = build_problem(candidate, candidate.limits, safe=False)
        relaxed = relaxed_cuts(problem, deadline=1e12)
        assert relaxed is not None and relaxed[1] / 1000 <= expected * (1 + 1e-6)
    assert planned > 3
    assert proved == planned


def test_a_plan_from_kinds_beats_the_one_from_their_mean_layer():
    """Heavy layers at the end: the mean layer splits evenly and makes the last stage the slowest."""
    drawn = random.Random(1)
    profile = mixed_profile(drawn, 60_000)
    (measurement,) = profile.measurements
    light = measurement.modules[NAME].kinds[0]
    heavy = replace(light, forward_us=3 * light.forward_us, backward_us=3 * light.backward_us)
    pattern = (0, 0, 0, 0, 1, 1)
    cost = replace(
        measurement.modules[NAME], kinds=(light, heavy), pattern=pattern, layer=mean_layer((light, heavy), pattern)
    )
    exact = replace(profile, measurements=(replace(measurement, modules={NAME: cost}),))
    mean = replace(cost, kinds=(), pattern=())
    averaged = replace(profile, measurements=(replace(measurement, modules={NAME: mean}),))
    cluster, layouts = Cluster(num_nodes=1, devices_per_node=2), [Layout(pipeline_size=2)]
    plans = [
        search(item, cluster, BATCH, SearchOptions(layouts=layouts, with_relaxations=False))
        for item in (exact, averaged)
    ]
    exactly, by_mean = (
        evaluate(exact, cluster, layouts[0], ModulePlacement.of_plan(plan), BATCH).step.total_us for plan in plans
    )
    assert plans[0].step.total_us == pytest.approx(exactly)
    assert plans[0].search.status == "optimal"
    assert exactly < 0.95 * by_mean


def test_where_no_layers_fit_the_shortage_is_reported():
    profile = mixed_profile(random.Random(3), 2_000)
    with pytest.raises(InfeasiblePlan, match="tightest"):
        search(
            profile, Cluster(num_nodes=1, devices_per_node=2), BATCH, SearchOptions(layouts=[Layout(pipeline_size=2)])
        )

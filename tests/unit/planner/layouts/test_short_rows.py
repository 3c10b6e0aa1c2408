"""Short interleaved pipelines in tight memory: proved, and equal to every split with every number recomputed."""

from __future__ import annotations

import itertools
from dataclasses import replace
from math import inf
from types import SimpleNamespace

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts import short_rows
from mindspeed_autoparallel.planner.layouts.options import SearchOptions, SolveOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.layouts.virtual_layouts import improve_layout
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB

LAYOUT = Layout(pipeline_size=2, virtual_size=2, schedule="interleaved")
CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=2), 4


def _language_model(capacity_mib: int, num_layers: int) -> Profile:
    profile = small_profile(capacity_mib=capacity_mib)
    module = replace(profile.model.modules[1], predecessors=(), num_layers=num_layers)
    return replace(
        profile,
        model=replace(profile.model, modules=(module,)),
        measurements=tuple(
            replace(point, modules={module.name: point.modules[module.name]}) for point in profile.measurements
        ),
    )


def _enumerated(profile: Profile) -> float | None:
    """Return the least step of all that fits by the exact peak; modules one after the other."""
    modules = profile.model.modules
    num = sum(module.num_layers for module in modules)
    best: float | None = None
    for cut in itertools.combinations(range(1, num), 3):
        layers, first = {}, 0
        for module in modules:
            ends = [min(max(end - first, 0), module.num_layers) for end in (0, *cut, num)]
            layers[module.name] = tuple(high - low for low, high in itertools.pairwise(ends))
            first += module.num_layers
        held = [count for row in layers.values() for count in row]
        for again in itertools.product(*(range(count + 1) for count in held)):
            rows = {name: {"full": again[4 * at : 4 * at + 4]} for at, name in enumerate(layers)}
            placement = ModulePlacement(layers=layers, recompute=rows)
            found = evaluate(profile, CLUSTER, LAYOUT, placement, BATCH, with_timeline=False)
            if found.fits and (best is None or found.step.total_us < best):
                best = found.step.total_us
    return best


def _search(profile: Profile, cluster: Cluster, layout: Layout, batch: int) -> tuple[str, float, float]:
    plan = search(profile, cluster, batch, SearchOptions(layouts=[layout], with_relaxations=False, num_workers=1))
    return plan.search.status, plan.step.total_us, plan.search.lower_bound_us


@pytest.mark.parametrize("capacity_mib", range(270, 430, 20))
def test_a_tight_short_pipeline_equals_enumeration(capacity_mib: int) -> None:
    profile = _language_model(capacity_mib, 5)
    expected = _enumerated(profile)
    if expected is None:
        with pytest.raises(InfeasiblePlan, match="no plan fits"):
            _search(profile, CLUSTER, LAYOUT, BATCH)
        return
    status, step_us, bound_us = _search(profile, CLUSTER, LAYOUT, BATCH)
    assert (status, step_us) == ("optimal", pytest.approx(expected))
    assert bound_us == pytest.approx(expected)


@pytest.mark.parametrize("capacity_mib", [290, 410])
def test_a_first_plan_with_virtual_stages_has_the_bound_of_its_search(capacity_mib: int) -> None:
    profile = _language_model(capacity_mib, 5)
    expected = _enumerated(profile)
    assert expected is not None
    (candidate,), _ = enumerate_layouts(profile, CLUSTER, BATCH, SpaceOptions(), [LAYOUT])
    options = SolveOptions(time_limit_s=60.0, seed=0, cutoff_us=1.2 * expected, only_faster=True, effort=0.2)
    found = improve_layout(candidate, options)
    assert found.evaluation is not None
    assert found.evaluation.step.total_us == pytest.approx(expected)
    assert found.lower_bound_us == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("capacity_mib", range(250, 470, 44))
def test_two_modules_in_tight_memory_equal_enumeration(capacity_mib: int) -> None:
    profile = small_profile(capacity_mib=capacity_mib)
    expected = _enumerated(profile)
    if expected is None:
        with pytest.raises(InfeasiblePlan, match="no plan fits"):
            _search(profile, CLUSTER, LAYOUT, BATCH)
        return
    assert _search(profile, CLUSTER, LAYOUT, BATCH) == (
        "optimal", pytest.approx(expected), pytest.approx(expected)
    )  # fmt: skip


@pytest.mark.parametrize("capacity_mib", [384])
def test_where_rows_know_peaks_from_one_side_only_the_plan_is_proved(capacity_mib: int) -> None:
    layout = Layout(pipeline_size=4, virtual_size=2, schedule="interleaved")
    profile = _language_model(capacity_mib, 12)
    assert _search(profile, Cluster(num_nodes=1, devices_per_node=4), layout, 8)[0] == "optimal"


def test_ways_to_recompute_end_with_the_time_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small_profile()
    cluster = Cluster(num_nodes=2, devices_per_node=1, memory_limit_bytes=MIB)
    (candidate,), _ = enumerate_layouts(profile, cluster, 4, SpaceOptions(), [Layout(pipeline_size=2)])
    problem = build_problem(candidate, candidate.limits, safe=False)
    clock = [0.0]

    def fits(*_: object) -> bool:
        clock[0] += 1.0
        return False

    monkeypatch.setattr(short_rows, "fits_rank", fits)
    monkeypatch.setattr(short_rows, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = short_rows.search_short_row(candidate, problem, deadline=inf)
    assert found is not None and found.complete and found.best is None
    every, clock[0] = clock[0], 0.0
    found = short_rows.search_short_row(candidate, problem, deadline=2.5)
    assert found is not None and not found.complete
    assert clock[0] == 3.0 < every

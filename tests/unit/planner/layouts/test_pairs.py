"""Combined 1F1B in the outer search: its legal layouts, its gain, and valid bounds."""

from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.bounds import pipeline_bound_ns
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.split.model.solution import step_of
from mindspeed_autoparallel.planner.split.strategies.enumeration import every_split
from mindspeed_autoparallel.runtime.megatron.layout_arguments import native_flags
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB

CLUSTER = Cluster(num_nodes=1, devices_per_node=4)
PAIRED = SpaceOptions(virtual_sizes=(1, 2), paired=True)


def profile_with_exchanges(exchange_us=1500.0, **changes):
    """Layers whose forward of 4.2 ms holds so much of exchanges, and the backward as much."""
    plain = language_profile(tensor=(1,), batches=(1,), **{"experts": (1, 2), "num_layers": 8, **changes})
    return replace(plain, measurements=tuple(_with_exchanges(item, exchange_us) for item in plain.measurements))


def _with_exchanges(measurement, exchange_us):
    if measurement.at.expert_size == 1:
        return measurement
    modules = {
        name: cost.with_layers(
            lambda _, layer: replace(layer, forward_exchange_us=exchange_us, backward_exchange_us=exchange_us)
        )
        for name, cost in measurement.modules.items()
    }
    return replace(measurement, modules=modules)


def test_pairs_are_tried_where_megatron_runs_them_and_no_elsewhere():
    candidates, verdicts = enumerate_layouts(profile_with_exchanges(), CLUSTER, 32, PAIRED)
    found = {(item.layout.pipeline_size, item.layout.virtual_size) for item in candidates if item.layout.paired}
    assert found == {(1, 1), (2, 2)}
    reasons = {verdict.reason for verdict in verdicts if verdict.layout.paired}
    assert "combined 1F1B needs virtual stages where PP is above 1, here 2." in reasons
    assert all(
        "full" not in item.measurement.modules["text_decoder"].layer.recompute
        for item in candidates
        if item.layout.paired
    )
    _, verdicts = enumerate_layouts(profile_with_exchanges(), CLUSTER, 32, PAIRED, [Layout(data_size=4, paired=True)])
    assert verdicts[0].reason == "combined 1F1B needs EP above 1."
    with pytest.raises(ConfigError, match="lacks the time of experts' exchanges"):
        enumerate_layouts(language_profile(experts=(2,)), CLUSTER, 32, PAIRED)
    with pytest.raises(ConfigError, match="none of the profile's layouts has EP above 1"):
        enumerate_layouts(language_profile(experts=(1,)), CLUSTER, 32, PAIRED)


def test_the_plan_uses_pairs_where_they_gain_and_sets_megatrons_flag():
    found = {}
    for exchange_us in (1500.0, 0.001):
        options = SearchOptions(space=PAIRED, time_limit_s=10.0, num_workers=1, with_relaxations=False)
        plan = search(profile_with_exchanges(exchange_us), CLUSTER, 32, options)
        found[exchange_us] = plan
        again, _ = replay(plan)
        assert again.step == plan.step and again.memory == plan.memory
        assert plan.search.lower_bound_us <= plan.step.total_us
    assert found[1500.0].layout.paired
    assert found[1500.0].step.total_us < found[0.001].step.total_us
    assert "--overlap-moe-expert-parallel-comm" in native_flags(found[1500.0])
    assert not found[0.001].layout.paired or found[0.001].layout.pipeline_size == 1


@pytest.mark.parametrize("sends", ["freed", "blocking"])
def test_the_solvers_bound_is_below_every_placement(sends):
    profile = replace(profile_with_exchanges(num_layers=6), interleaved_sends=sends)
    layout = Layout(pipeline_size=2, virtual_size=2, data_size=2, expert_size=2, schedule="interleaved", paired=True)
    ((candidate,), _) = enumerate_layouts(profile, CLUSTER, 16, PAIRED, [layout])
    problem = build_problem(candidate, (60_000 * MIB,) * 2, safe=False)
    assert problem.paired
    checked = 0
    for held in every_split(problem, 10**6).tolist():
        rows = tuple(
            tuple(tuple(count) if q == 0 else (0,) * 4 for q in range(len(segment.kinds)))
            for segment, count in zip(problem.segments, zip(*held, strict=True), strict=True)
        )
        layers = tuple(rows[1][0])
        if not all(layers):
            continue
        exact = evaluate(profile, CLUSTER, layout, ModulePlacement(layers={"text_decoder": layers}, recompute={}), 16)
        seen = step_of(problem, rows).step_time
        assert seen <= exact.step.pipeline_us * 1000, layers
        assert pipeline_bound_ns(candidate) <= exact.step.pipeline_us * 1000
        checked += 1
    assert checked == 10

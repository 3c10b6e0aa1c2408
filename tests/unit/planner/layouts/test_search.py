"""The search against enumeration, its verdicts, and its error if nothing fits."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from math import inf
from typing import cast

import pytest
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Open, silent
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts import layout_search, short_rows, turns, virtual_layouts
from mindspeed_autoparallel.planner.layouts.group_sizes import three_chunks
from mindspeed_autoparallel.planner.layouts.layout_search import LayoutSearch
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.rank_looks import raise_smallest
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.layouts.tasks import BOUND, IMPROVE, PROVE, SOLVE, Outcome, Request, Task
from mindspeed_autoparallel.planner.layouts.turns import LOOKS
from mindspeed_autoparallel.planner.layouts.workers import Workers
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile, VariableData
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module, Plan
from mindspeed_autoparallel.units import MIB


@pytest.fixture
def profile() -> Profile:
    return small_profile()


@pytest.fixture
def varying() -> Profile:
    samples = tuple((0.5 + index % 4 * 0.5, 1.0) for index in range(8))
    return small_profile(variable_data=VariableData(modules=("image_encoder", "text_decoder"), samples=samples))


def _rows(total: int, num: int) -> list[tuple[int, ...]]:
    return [row for row in product(range(total + 1), repeat=num) if sum(row) == total]


def _placements(num: int, features: int = 0) -> list[ModulePlacement]:
    """Every placement of 2 + 4 layers in order with no empty stage, with every number of recomputed layers; as many
    decoder layers as ``features`` beside the last of the encoder."""
    found = []
    for vit, llm in product(_rows(2, num), _rows(4, num)):
        if max(v for v in range(num) if vit[v]) > min(v for v in range(num) if llm[v]):
            continue
        if not all(a + b for a, b in zip(vit, llm, strict=True)):
            continue
        if llm[max(v for v in range(num) if vit[v])] < features:
            continue
        for again in product(*(range(count + 1) for count in (*vit, *llm))):
            found.append(
                ModulePlacement(
                    layers={"image_encoder": vit, "text_decoder": llm},
                    recompute={"image_encoder": {"full": again[:num]}, "text_decoder": {"full": again[num:]}},
                )
            )
    return found


FOUR, BATCH = Cluster(num_nodes=1, devices_per_node=4), 8


@functools.cache
def _every(features: int) -> list[tuple[int, float]]:
    """Return the highest peak, in bytes, and the step of every placement: neither depends on the capacity."""
    profile, every = _with_deepstack(small_profile(), features), []
    candidates, _ = enumerate_layouts(profile, FOUR, BATCH, SpaceOptions())
    for candidate in candidates:
        for placement in _placements(candidate.layout.num_virtual_stages, features):
            found = evaluate(profile, FOUR, candidate.layout, placement, BATCH, with_timeline=False)
            every.append((max(rank.peak_bytes for rank in found.memory), found.step.total_us))
    return every


def _enumerate(capacity_mib: int, features: int = 0) -> float:
    return min((step_us for peak, step_us in _every(features) if peak <= capacity_mib * MIB), default=inf)


def _with_deepstack(profile: Profile, features: int) -> Profile:
    encoder, decoder = profile.model.modules
    modules = replace(encoder, deepstack_layers=features), decoder
    return replace(profile, model=replace(profile.model, modules=modules))


@pytest.mark.parametrize(
    ("capacity_mib", "features"), [(1000, 0), (420, 0), (330, 0), (240, 0), (1000, 3), (330, 2), (240, 2)]
)
def test_search_equals_enumeration_of_layouts_and_placements(capacity_mib: int, features: int) -> None:
    profile, cluster = small_profile(capacity_mib=capacity_mib), FOUR
    profile = _with_deepstack(profile, features)
    best = _enumerate(capacity_mib, features)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlan):
            search(profile, cluster, BATCH)
        return
    plan = search(profile, cluster, BATCH)
    assert plan.search.lower_bound_us <= best * (1 + 1e-9) <= plan.step.total_us * (1 + 2e-9)
    # Distance allowed only as far as the plan itself admits it.
    assert plan.step.total_us <= best / (1 - plan.search.gap_fraction) * (1 + 1e-9)
    assert plan.step.total_us <= best * 1.005
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)


def test_decoder_layers_with_features_that_do_not_fit_one_stage_are_reported() -> None:
    cluster = Cluster(num_nodes=1, devices_per_node=4)
    search(small_profile(capacity_mib=130), cluster, 8)
    with pytest.raises(
        InfeasiblePlan, match="the end of image_encoder and the first 4 layers of text_decoder"
    ) as caught:
        search(_with_deepstack(small_profile(capacity_mib=130), 4), cluster, 8)
    assert "\n" not in str(caught.value)


def test_layouts_with_more_stages_than_parts_are_illegal_with_the_reason() -> None:
    plan = search(_with_deepstack(small_profile(), 4), Cluster(num_nodes=1, devices_per_node=4), 8)
    (verdict,) = [v for v in plan.search.verdicts if v.layout.label() == "PP4 TP1 DP1 MBS1"]
    assert "4 stages are more than the 2 parts that 6 layers can be cut into" in verdict.reason


def test_pipeline_of_one_stage_is_planned_not_crashed(profile: Profile) -> None:
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=1), 4)
    assert plan.layout.pipeline_size == 1
    assert plan.layers_of("text_decoder") == (4,)
    assert plan.search.status == "optimal"


def test_every_configuration_has_one_verdict_with_a_reason(profile: Profile) -> None:
    plan = search(profile, Cluster(num_nodes=2, devices_per_node=4), 8)
    labels = [verdict.layout.label() for verdict in plan.search.verdicts]
    assert len(labels) == len(set(labels)) == plan.search.num_configurations
    assert all(verdict.reason for verdict in plan.search.verdicts)
    assert {"illegal", "solved"} <= {verdict.outcome for verdict in plan.search.verdicts}


def test_same_input_gives_the_same_plan(profile: Profile) -> None:
    plans = [search(profile, Cluster(num_nodes=1, devices_per_node=4), 16) for _ in range(2)]
    assert plans[0].stages == plans[1].stages
    assert [v.outcome for v in plans[0].search.verdicts] == [v.outcome for v in plans[1].search.verdicts]


def test_alternatives_are_distinct_and_no_faster(profile: Profile) -> None:
    plan = search(profile, Cluster(num_nodes=1, devices_per_node=4), 16, SearchOptions(top_k=2))
    layouts = [plan.layout, *(other.layout for other in plan.alternatives)]
    assert len(set(map(Layout.label, layouts))) == len(layouts) == 3
    assert all(other.step_us >= plan.step.total_us for other in plan.alternatives)


def test_where_nothing_fits_the_message_names_stage_missing_memory_and_a_limit_that_is_enough() -> None:
    profile = small_profile(capacity_mib=60)
    with pytest.raises(InfeasiblePlan, match=r"[MG]iB too much.*A memory limit of \d+ MiB") as caught:
        search(profile, Cluster(num_nodes=1, devices_per_node=2), 4)
    enough = int(str(caught.value).split("A memory limit of ")[1].split()[0])
    cluster = Cluster(num_nodes=1, devices_per_node=2, memory_limit_bytes=enough * MIB)
    assert search(profile, cluster, 4).step.total_us > 0


def test_a_batch_that_no_layout_divides_is_refused_with_the_reason(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="not divisible"):
        search(profile, Cluster(num_nodes=1, devices_per_node=8), 7, SearchOptions(layouts=[Layout(data_size=8)]))


def test_where_no_layout_is_possible_each_kind_of_reason_is_listed_once(profile: Profile) -> None:
    with pytest.raises(ConfigError) as refused:
        search(profile, Cluster(num_nodes=1, devices_per_node=16), 7)
    message = str(refused.value)
    assert message.count("stages are more than") == 1
    assert "not divisible" in message


def test_memory_limit_of_zero_is_refused() -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Cluster(num_nodes=1, devices_per_node=2, memory_limit_bytes=0)


@pytest.mark.parametrize(("batch", "seconds"), [(0, 1.0), (4, 0.0), (4, float("nan"))])
def test_impossible_requests_are_refused(profile: Profile, batch: int, seconds: float) -> None:
    with pytest.raises(ConfigError):
        search(profile, Cluster(num_nodes=1, devices_per_node=2), batch, SearchOptions(time_limit_s=seconds))


def test_varying_microbatches_are_judged_by_the_mean_and_reported_with_percentiles(varying: Profile) -> None:
    plan = search(varying, Cluster(num_nodes=1, devices_per_node=4), 16)
    assert plan.step.p50_us is not None and plan.step.p95_us is not None
    assert plan.step.p50_us <= plan.step.p95_us
    assert plan.search.lower_bound_us <= plan.step.total_us


def _row_of_layers() -> Profile:
    """Twelve layers and an output layer, of which one device cannot hold all."""
    cost = ModuleCost(layer=block(1000, saved_mib=5), post=block(1500))
    module = Module(name="text_decoder", result_key="llm", num_layers=12)
    return small_profile(
        capacity_mib=180,
        model=Model(name="small", modules=(module,), sequence_length=128),
        measurements=(Measurement(at=MeasuredAt(tensor_size=1), modules={"text_decoder": cost}),),
    )


def _searched_on_four(sizes: tuple[int, ...] | None) -> Plan:
    space = SpaceOptions(virtual_sizes=sizes, distributed_optimizer=False)
    options = SearchOptions(num_workers=1, space=space, with_relaxations=False)
    return search(_row_of_layers(), Cluster(num_nodes=1, devices_per_node=4), 16, options)


@pytest.mark.parametrize(("long", "proved"), [(False, False), (True, False), (False, True)])
def test_layouts_with_virtual_stages_are_bounded_then_planned_then_searched_long(
    monkeypatch: pytest.MonkeyPatch, long: bool, proved: bool
) -> None:
    asked: list[int] = []
    perform = Workers.perform

    def note(self: Workers, tasks: Sequence[Task], enough: bool | None = None) -> list[Outcome]:
        asked.extend(LOOKS.index(task.kind) for task in tasks if task.layout.virtual_size > 1 and task.kind in LOOKS)
        return perform(self, tasks, enough=enough)

    monkeypatch.setattr(Workers, "perform", note)
    monkeypatch.setattr(short_rows, "MOST_EVENTS_OF_CUTS", 0)
    monkeypatch.setattr(turns, "takes_long", lambda candidate: long and candidate.layout.virtual_size > 1)
    searched = virtual_layouts._searched
    if not proved:
        monkeypatch.setattr(virtual_layouts, "_searched", lambda *given: (searched(*given)[0], 0.0))
    plan = _searched_on_four((1, 2, 3))
    if proved:  # by the search of the first plan
        assert set(asked) == {LOOKS.index(look) for look in (BOUND, IMPROVE)}
        return
    # What takes long is bounded by whole layers, which is enough here; what is solved in a moment is not before.
    assert set(asked) == {LOOKS.index(look) for look in (BOUND, IMPROVE, PROVE if long else SOLVE)}
    assert asked == sorted(asked)
    labels = [verdict.layout.label() for verdict in plan.search.verdicts]
    assert len(labels) == len(set(labels))
    assert plan.search.lower_bound_us <= plan.step.total_us


def test_three_chunks_are_tried_in_the_best_pipelines_alone() -> None:
    tried, every = _searched_on_four(None), _searched_on_four((1, 2, 3, 4))
    of_three = [verdict.layout for verdict in tried.search.verdicts if verdict.layout.virtual_size == 3]
    assert [layout.pipeline_size for layout in of_three] == [tried.layout.pipeline_size]
    assert tried.step.total_us == pytest.approx(every.step.total_us)
    assert tried.search.lower_bound_us <= tried.step.total_us
    two = Layout(pipeline_size=2, data_size=2, virtual_size=2, schedule="interleaved", microbatch_group_size=3)
    found = [(two, 100.0), (replace(two, virtual_size=1, schedule="1f1b"), 101.0), (Layout(data_size=4), 101.5)]
    found.append((Layout(pipeline_size=4), 103.0))
    # Both of PP2 are one layout with three chunks; PP1 has none, and PP4 is more than 2 % behind.
    assert three_chunks(found, 16) == [replace(two, virtual_size=3, microbatch_group_size=0)]


@pytest.mark.parametrize("seconds", [0.0, layout_search.GIVEN_UP_S])
def test_virtual_stages_that_time_left_open_are_named_unless_their_bound_is_the_step_of_the_plan(
    monkeypatch: pytest.MonkeyPatch, seconds: float
) -> None:
    """With time for their bounds, these reach the step of the plan."""
    without, everything = _searched_on_four((1,)), _searched_on_four((1, 2, 4))
    monkeypatch.setattr("mindspeed_autoparallel.planner.layouts.options.VIRTUAL_S", 0.0)
    monkeypatch.setattr(turns, "takes_long", lambda candidate: candidate.layout.virtual_size > 1)
    monkeypatch.setattr(layout_search, "GIVEN_UP_S", seconds)
    plan = _searched_on_four(None)
    assert everything.step.total_us <= plan.step.total_us <= without.step.total_us
    left = [verdict.lower_bound_us for verdict in plan.search.verdicts if verdict.outcome == "unsolved"]
    assert bool(left) == (not seconds)
    assert all(plan.search.lower_bound_us <= (bound or 0.0) < plan.step.total_us for bound in left)
    assert 0 < plan.search.lower_bound_us <= everything.step.total_us * (1 + 1e-9)


@pytest.mark.parametrize("capacity_mib", [1000, 330, 240])
def test_no_plan_beats_the_bounds_of_layouts_that_time_left_open(capacity_mib: int) -> None:
    profile, cluster = small_profile(capacity_mib=capacity_mib), Cluster(num_nodes=1, devices_per_node=4)
    candidates, _ = enumerate_layouts(profile, cluster, 8, SpaceOptions())
    best_us = _enumerate(capacity_mib)
    offered: list[float] = []
    with Workers(Request(profile=profile, cluster=cluster, global_batch_size=8), 1) as workers:
        items = [Open(0.0, 0.0, order, item) for order, item in enumerate(candidates)]
        raised = raise_smallest(
            workers, items, 1.1 * best_us, inf, lambda item, outcome: offered.append(outcome.step_us or 0.0)
        )
    assert sorted(item.order for item in raised) == [item.order for item in items]
    assert min(item.bound_us for item in raised) <= best_us * (1 + 1e-9) and min(offered, default=inf) >= best_us * (
        1 - 1e-9
    )
    for item in raised:
        num, layout = item.item.layout.num_virtual_stages, item.item.layout
        found = [evaluate(profile, cluster, layout, one, 8, with_timeline=False) for one in _placements(num)]
        least_us = min((each.step.total_us for each in found if each.fits), default=inf)
        assert item.bound_us <= least_us * (1 + 1e-9)


def test_twice_the_microbatches_of_groups_that_only_the_plan_runs_are_tried_in_smaller_groups() -> None:
    # Groups of 3 leave 2 of 5 microbatches, which Megatron runs on two stages, and 1 of 10, which it does not.
    layout = Layout(pipeline_size=2, virtual_size=2, schedule="interleaved", microbatch_group_size=3)
    plan = search(small_profile(), Cluster(num_nodes=1, devices_per_node=2), 5, SearchOptions(layouts=[layout]))
    assert [relaxation.step_us is not None for relaxation in plan.search.relaxations] == [True, True]


def test_a_simple_split_never_takes_the_place_of_a_faster_plan_of_the_same_layout() -> None:
    """The plain recipe is found first; simple splits of the same layout come later and may be slower."""

    class OfOneLayout:
        def perform(self, tasks: Sequence[Task], enough: bool | None = None) -> list[Outcome]:
            return [Outcome(placement=ModulePlacement(layers={}, recompute={}), step_us=200.0) for _ in tasks]

    (candidate,), _ = enumerate_layouts(
        small_profile(), Cluster(num_nodes=1, devices_per_node=1), 4, SpaceOptions(), [Layout()]
    )
    found = LayoutSearch(
        [candidate], [1.0], workers=cast(Workers, OfOneLayout()), deadline=inf, num_alternatives=0, progress=silent
    )
    found.know(candidate, Outcome(placement=ModulePlacement(layers={}, recompute={}), step_us=100.0))
    found.warm_up()
    assert found.best_us == 100.0

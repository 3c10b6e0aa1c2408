"""1F1B beside interleaved in what is printed and drawn."""

from __future__ import annotations

import functools
from dataclasses import fields, replace

from hypothesis import given
from hypothesis import strategies as st
from small_profile import block, small_profile

from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.report.data import report_data
from mindspeed_autoparallel.report.search_data import group_sizes, virtual_comparison
from mindspeed_autoparallel.spec import Cluster, Model, Module, Plan
from mindspeed_autoparallel.spec.plan_records import EDITED, Alternative, DataRecord
from mindspeed_autoparallel.units import format_us

CLUSTER = Cluster(num_nodes=1, devices_per_node=2)


def _profile() -> Profile:
    """Eight equal layers whose parameters are too many to hold all on one device."""
    module = Module(name="text_decoder", result_key="llm", num_layers=8)
    cost = ModuleCost(layer=block(1000, saved_mib=5))
    return small_profile(
        capacity_mib=180,
        model=Model(name="small", modules=(module,), sequence_length=128),
        measurements=(Measurement(at=MeasuredAt(tensor_size=1), modules={"text_decoder": cost}),),
    )


@functools.cache
def _plan(*virtual_sizes: int) -> Plan:
    options = SearchOptions(space=SpaceOptions(virtual_sizes=virtual_sizes, distributed_optimizer=False))
    return search(_profile(), CLUSTER, 4, options)


def drawn_plan(plan: Plan, virtual_size: int, others: list[tuple[int, float]]) -> Plan:
    """Return ``plan`` as one for drawn data; ``others``: VPP and step, as a multiple of the plan's, of safe ones."""
    chunks = {v.layout.virtual_size: v.layout for v in plan.search.verdicts if v.layout.pipeline_size == 2}
    mean_us, record = 1.5 * plan.step.total_us, dict.fromkeys((one.name for one in fields(DataRecord)), 0)
    data = DataRecord(**{**record, "mean_us": mean_us, "considered": (), "notes": ()})  # type: ignore[arg-type]
    alternatives = tuple(
        Alternative(
            layout=replace(chunks[min(size, 2)], virtual_size=size),
            step_us=times * mean_us,
            lower_bound_us=None,
            layers={},
            recompute={},
            peak_bytes=0,
        )
        for size, times in others
    )
    return replace(plan, layout=chunks[virtual_size], data=data, alternatives=alternatives)


def test_the_gain_of_virtual_stages_is_stated_against_the_best_plan_without_them() -> None:
    both, plain = _plan(1, 2), _plan(1)
    assert both.layout.virtual_size == 2 and plain.layout.virtual_size == 1
    saved = 1 - both.step.total_us / plain.step.total_us
    assert saved > 0
    text = virtual_comparison(both)
    assert f"save {saved:.2%}" in text
    assert plain.layout.label() in text and format_us(plain.step.total_us) in text
    assert text in report_data(both).limits


def test_the_group_size_and_the_other_searched_ones_are_listed() -> None:
    plan = _plan(1, 2)
    size = plan.layout.microbatch_group_size or 2
    (other,) = {2, 4} - {size}
    text = group_sizes(plan)
    assert text.startswith(f"{size} microbatches of a chunk in a row")
    assert f"also searched: {other}" in text
    assert text in report_data(plan).limits
    edited = replace(plan, search=replace(plan.search, status=EDITED))
    assert "searched" not in group_sizes(edited)
    assert group_sizes(_plan(1)) == ""


def test_group_sizes_are_compared_within_one_pipeline_size() -> None:
    """A group size of a short pipeline is below the size of a long one, which no layout may have."""
    plan = _plan(1, 2)
    verdict = next(v for v in plan.search.verdicts if v.layout.virtual_size == 2)
    longer = replace(verdict, layout=replace(verdict.layout, pipeline_size=16, microbatch_group_size=0))
    plan = replace(
        plan,
        layout=replace(plan.layout, microbatch_group_size=3),
        search=replace(plan.search, verdicts=(*plan.search.verdicts, longer)),
    )
    assert group_sizes(plan).startswith("3 microbatches of a chunk in a row")


def test_without_virtual_stages_the_text_omits_them() -> None:
    assert virtual_comparison(_plan(1)) == ""


def test_unsettled_layouts_are_stated() -> None:
    both, plain = _plan(1, 2), _plan(1)
    other = next(v for v in both.search.verdicts if v.layout.virtual_size == 2)
    open_one = replace(other, outcome="unsolved", step_us=None, lower_bound_us=1000.0)
    for plan in (plain, both):
        plan = replace(plan, search=replace(plan.search, verdicts=(*plan.search.verdicts, open_one)))
        assert "1 layouts with them are not settled" in virtual_comparison(plan)


def test_virtual_stages_that_gain_nothing() -> None:
    both, plain = _plan(1, 2), _plan(1)
    other = next(v for v in both.search.verdicts if v.layout.virtual_size == 2)
    slower = replace(other, step_us=2 * plain.step.total_us)
    plan = replace(plain, search=replace(plain.search, verdicts=(*plain.search.verdicts, slower)))
    text = virtual_comparison(plan)
    assert "gain nothing" in text and format_us(2 * plain.step.total_us) in text


@given(
    st.sampled_from([1, 2]),
    st.lists(st.tuples(st.sampled_from([1, 2, 4]), st.floats(1.0, 3.0)), max_size=4),
    st.floats(0.2, 2.0),
)
def test_virtual_stages_of_a_plan_for_drawn_data_are_compared_by_drawn_steps_of_safe_plans(
    virtual_size: int, others: list[tuple[int, float]], for_mean_sample: float
) -> None:
    """For the mean sample an unsafe plan may be faster."""
    plan = drawn_plan(_plan(1, 2), virtual_size, others)
    verdicts = tuple(
        replace(one, step_us=for_mean_sample * plan.step.total_us) if one.step_us else one
        for one in plan.search.verdicts
    )
    text = virtual_comparison(replace(plan, search=replace(plan.search, verdicts=verdicts)))
    rivals = [times for size, times in others if (size > 1) != (virtual_size > 1)]
    if not rivals:
        assert text == ""
    else:
        assert format_us(min(rivals) * plan.mean_us) in text
        assert (f"save {1 - 1 / min(rivals):.2%}" if virtual_size > 1 else "gain nothing") in text

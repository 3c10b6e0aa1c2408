"""A hetero plan on the page, in the table and in the trace."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.planner.hetero.compare import HeteroOptions
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.wanted import Wanted, find_plan
from mindspeed_autoparallel.report import chrome_trace, render_page, render_table, report_data
from mindspeed_autoparallel.report.encoders import encoders, gain_parts, section
from mindspeed_autoparallel.spec import Cluster, Plan, to_json

FOUR = Cluster(num_nodes=1, devices_per_node=4)
WANTED = Wanted(cluster=FOUR, global_batch_size=8, options=SearchOptions(), hetero=HeteroOptions())


@pytest.fixture(scope="module")
def hetero() -> Plan:
    return find_plan(small_profile(), WANTED).hetero


def test_parts_of_the_step_add_up_to_it(hetero: Plan) -> None:
    assert sum(part.us for part in report_data(hetero).step_parts) == pytest.approx(hetero.step.total_us)


def test_page_shows_encoders_and_the_homogeneous_plan(hetero: Plan) -> None:
    page = render_page(hetero)
    assert hetero.hetero is not None
    assert hetero.hetero.homogeneous is not None
    assert 'id="encoders"' in page
    assert f"the best homogeneous plan, {hetero.hetero.homogeneous.layout.label()}" in page


def test_the_page_of_the_slower_plan_notes_it_and_claims_no_overall_proof(hetero: Plan) -> None:
    assert hetero.hetero is not None
    assert hetero.hetero.homogeneous is not None
    assert hetero.step.total_us > hetero.hetero.homogeneous.step_us, "it loses"
    values = report_data(hetero).headline
    assert not values.proved
    assert "proved optimal" not in render_page(hetero)
    assert any(text.startswith("The best homogeneous plan is faster") for text in values.warnings)


def test_the_page_of_a_faster_homogeneous_plan_gives_the_lag_of_hetero() -> None:
    comparison = find_plan(small_profile(), WANTED)
    winner = comparison.homogeneous
    assert winner is not None
    assert comparison.best is winner
    behind = comparison.hetero.step.total_us / winner.step.total_us - 1
    for shown in (render_page(winner), render_table(winner)):
        assert f"Hetero parallel was searched too: its best plan, {comparison.hetero.layout.label()}" in shown
        assert f"{behind:.1%} more than this one" in shown
    assert Plan.parse(to_json(winner)).hetero_rival == winner.hetero_rival


def test_parts_of_the_gain_add_up_to_it(hetero: Plan) -> None:
    record = hetero.hetero
    assert record is not None
    assert record.homogeneous is not None
    parts = gain_parts(record.homogeneous.step_us, record, hetero.step.total_us)
    assert [part.name for part in parts] == ["layouts", "batch scale", "recomputing encoders"]
    gain = record.homogeneous.step_us - hetero.step.total_us
    assert sum(part.saved_us for part in parts) == pytest.approx(gain)
    assert record.kept_us == pytest.approx(hetero.step.total_us), "the plan keeps its activations"
    tight = gain_parts(100.0, replace(record, scale_one_us=None, kept_us=None), 70.0)
    assert [(part.name, part.saved_us) for part in tight] == [
        ("layouts with batch scale with recomputing encoders", 30)
    ]
    again = replace(record, memory="recompute", scale_one_us=None, kept_us=None, scale_one_again_us=85.0)
    assert [(part.name, part.saved_us) for part in gain_parts(100.0, again, 70.0)] == [
        ("layouts with recomputing encoders", 15),
        ("batch scale", 15),
    ]


def test_the_page_of_a_slower_homogeneous_plan_gives_the_lead_of_hetero() -> None:
    winner = find_plan(small_profile(), WANTED).homogeneous
    assert winner is not None
    assert winner.hetero_rival is not None
    loser = replace(winner, hetero_rival=replace(winner.hetero_rival, step_us=0.8 * winner.step.total_us))
    assert "20.0% less than this one" in render_page(loser)
    assert "proved optimal" not in render_page(loser)


def test_timeline_shows_the_encoders_around_the_pipeline(hetero: Plan) -> None:
    assert hetero.hetero is not None
    (phase,) = hetero.hetero.encoders
    shown = report_data(hetero).timeline
    assert shown.names[:2] == ("image_encoder forward", "image_encoder backward")
    outside = phase.forward_us + phase.backward_us + phase.exchange_us
    assert shown.end_us == pytest.approx(hetero.step.pipeline_us + outside)
    for row in shown.rows:
        kinds, starts, lengths = row[::5], row[3::5], row[4::5]
        assert (kinds[0], starts[0]) == (2, 0.0)
        assert 0 in kinds
        assert list(starts) == sorted(starts)
        assert starts[-1] + lengths[-1] == pytest.approx(shown.end_us, abs=0.05)


def test_page_of_a_homogeneous_plan_has_no_such_section() -> None:
    plan = search(small_profile(), FOUR, 8, SearchOptions(with_relaxations=False))
    assert 'id="encoders"' not in render_page(plan)
    assert report_data(plan).encoders is None


def test_the_table_has_the_encoders_time_and_the_limits_of_the_plan(hetero: Plan) -> None:
    table = render_table(hetero)
    assert "image_encoder TP2 DP2 x4 outside the pipeline: 1 batch of up to 4 samples" in table
    assert "hetero (memory upfront): 1.001 times as slow as the best homogeneous plan" in table
    assert "limited by: time of image_encoder outside the pipeline" in table


def test_trace_puts_the_pipeline_between_the_encoder_phases(hetero: Plan) -> None:
    assert hetero.hetero is not None
    (phase,) = hetero.hetero.encoders
    events = [event for event in chrome_trace(hetero)["traceEvents"] if event["ph"] == "X"]
    named = {event["name"]: event for event in events}
    first = min(event["ts"] for event in events if event["cat"] in ("forward", "backward"))
    last = max(event["ts"] + event["dur"] for event in events if event["cat"] in ("forward", "backward"))
    assert named["image_encoder forward"]["ts"] == 0.0
    assert first == pytest.approx(phase.forward_us)
    assert named["image_encoder backward"]["ts"] == pytest.approx(last)
    assert max(event["ts"] + event["dur"] for event in events) == pytest.approx(hetero.step.total_us)


def test_names_from_a_profile_are_escaped(hetero: Plan) -> None:
    assert hetero.hetero is not None
    evil = replace(hetero.hetero.encoders[0], module="<script>x</script>")
    plan = replace(hetero, hetero=replace(hetero.hetero, encoders=(evil,)))
    values = encoders(plan)
    assert values is not None
    assert "<script>x</script>" not in section(values)

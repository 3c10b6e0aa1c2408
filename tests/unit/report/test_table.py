"""The text table against the file it should be, and what may never be in it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from example_plan import example_plan

from mindspeed_autoparallel.report import render_table
from mindspeed_autoparallel.spec.layout import Layout

GOLDEN = Path(__file__).parents[2] / "golden" / "report"


def test_table_is_the_golden_one() -> None:
    assert render_table(example_plan()) == (GOLDEN / "table.txt").read_text()


def test_virtual_stages_show_their_rank_and_one_peak_per_rank() -> None:
    plan = example_plan()
    stages = tuple(replace(s, pipeline_rank=s.stage % 4, chunk=s.stage // 4) for s in plan.stages)
    layout = Layout(pipeline_size=4, virtual_size=2, schedule="interleaved")
    lines = render_table(replace(plan, layout=layout, stages=stages, memory=plan.memory[:4])).splitlines()
    assert lines[1].split()[:2] == ["stage", "rank"]
    peaks = [line.split()[-1] for line in lines[2:] if line[:5].strip().isdigit() and len(line) == len(lines[1])]
    assert len(peaks) == 4


def test_unproved_plan_prints_bound_and_gap() -> None:
    plan = example_plan()
    search = replace(plan.search, status="feasible", gap_fraction=0.021, lower_bound_us=10_000_000.0)
    text = render_table(replace(plan, search=search))
    assert "not proved: at most 2.1 % from the best possible" in text
    assert "no plan is faster than 10.00 s: gap 2.1 %" in text


def test_a_gap_below_a_tenth_of_a_percent_is_not_printed_as_none() -> None:
    plan = example_plan()
    search = replace(plan.search, status="feasible", gap_fraction=0.00013, lower_bound_us=10_000_000.0)
    text = render_table(replace(plan, search=search))
    assert "at most 0.013 % from the best possible" in text
    assert "gap 0.013 %" in text


def test_small_models_count_parameters_in_millions() -> None:
    plan = example_plan()
    model = replace(plan.model, num_parameters=12_340_000, num_active_parameters=3_100_000)
    assert "(12.3 M parameters, 3.1 M active)" in render_table(replace(plan, model=model))


def test_names_cannot_move_the_cursor_or_add_lines() -> None:
    plan = example_plan()
    hostile = replace(plan, model=replace(plan.model, name="a\x1b[2J\nb"))
    assert "\x1b" not in render_table(hostile)
    assert len(render_table(hostile).splitlines()) == len(render_table(plan).splitlines())


def test_not_measured_is_not_written_where_nothing_is_measured() -> None:
    plan = example_plan()
    text = render_table(replace(plan, profile=replace(plan.profile, source="analytic")))
    assert "12 configurations are without computed costs and left out" in text and "not measured" not in text

"""What page, table and trace are drawn from."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from example_plan import LINK_US, example_plan

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.report import chrome_trace, report_data
from mindspeed_autoparallel.report.headline import headline, warnings
from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate
from mindspeed_autoparallel.spec.codec import to_json
from mindspeed_autoparallel.spec.layout import Layout


def test_the_example_is_a_valid_plan() -> None:
    example_plan().check()


@pytest.mark.parametrize("num_microbatches", [0, -4, 10**6])
def test_a_plan_with_more_operations_than_can_be_replayed_is_refused(num_microbatches: int) -> None:
    with pytest.raises(PlanError, match="a plan has 1 to 400000"):
        replace(example_plan(), num_microbatches=num_microbatches).check()


def test_a_plan_that_would_be_replayed_for_minutes_is_not_drawn() -> None:
    assert "are drawn" in report_data(replace(example_plan(), num_microbatches=4000)).timeline.error


def test_data_is_json() -> None:
    assert (
        json.loads(json.dumps(to_json(report_data(example_plan())), allow_nan=False))["headline"]["layout"]
        == "PP8 TP4 DP4 MBS1 SP"
    )


def test_memory_terms_add_up_to_the_peak_and_keep_one_order() -> None:
    plan = example_plan()
    memory = report_data(plan).memory
    assert len(memory.ranks) == 8
    for rank in memory.ranks:
        assert sum(rank.terms.get(name, 0) for name in memory.terms) == rank.peak_bytes
    largest = [max(rank.terms[name] for rank in plan.memory) for name in memory.terms]
    assert largest == sorted(largest, reverse=True)


def test_stage_rows_hold_every_layer_once() -> None:
    rows = report_data(example_plan()).stages
    seen: dict[str, list[int]] = {}
    for row in rows:
        for part in row.modules:
            seen.setdefault(part.name, []).extend(range(part.first, part.last + 1))
    assert seen == {"image_encoder": [*range(32)], "audio_encoder": [*range(12)], "text_decoder": [*range(80)]}
    assert rows[1].modules[2].recompute == {"full": 2, "selective": 3}


def test_replay_finds_the_message_time_the_plan_was_made_with() -> None:
    plan = example_plan()
    found = replay(plan)
    assert found.inferred
    assert found.step.step_time == pytest.approx(plan.step.pipeline_us, rel=1e-6)
    assert found.message_us == pytest.approx(LINK_US, rel=1e-3)


def test_a_replay_of_stages_slower_than_the_plan_is_not_fitted() -> None:
    plan = example_plan()
    short = replace(plan, step=replace(plan.step, pipeline_us=plan.step.pipeline_us / 2))
    found = replay(short)
    assert found.message_us == 0
    assert found.step.step_time > short.step.pipeline_us * 1.5


@pytest.mark.parametrize("schedule, virtual_size", [("interleaved", 2), ("gpipe", 1), ("1f1b", 1)])
def test_timeline_has_every_action_of_every_schedule(schedule: str, virtual_size: int) -> None:
    plan = example_plan()
    layout = Layout(pipeline_size=8 // virtual_size, virtual_size=virtual_size, schedule=schedule)
    plan = replace(plan, layout=layout, num_microbatches=16)
    shown = report_data(plan).timeline
    assert len(shown.rows) == layout.pipeline_size
    for row in shown.rows:
        actions = {tuple(row[i : i + 3]) for i in range(0, len(row), 5)}
        assert actions == {(b, c, m) for b in (0, 1) for c in range(virtual_size) for m in range(16)}
        starts, lengths = row[3::5], row[4::5]
        assert all(a + n <= b + 0.02 for a, n, b in zip(starts, lengths, starts[1:], strict=False)), "blocks overlap"
        assert starts[-1] + lengths[-1] <= shown.end_us + 0.02
    for phase in shown.phases:
        assert 0 <= phase.start < phase.end <= shown.end_us


def test_busy_share_is_the_simulators() -> None:
    plan = example_plan()
    times = StepTimes(
        forward=[stage.forward_us for stage in plan.stages],
        backward=[stage.backward_us for stage in plan.stages],
        per_message=LINK_US,
    )
    step = simulate(make_program("1f1b", 8, 32), times, rendezvous=True, with_timeline=True)
    busy = report_data(plan).timeline.busy
    assert busy == pytest.approx([value / step.step_time for value in step.busy], rel=1e-4)
    assert 1 - sum(busy) / 8 == pytest.approx(plan.step.bubble_fraction, rel=1e-3)


def test_every_verdict_is_in_one_group() -> None:
    plan = example_plan()
    groups = report_data(plan).verdicts
    assert {group.outcome for group in groups} == {"solved", "bounded", "memory", "illegal", "unmeasured", "unsolved"}
    assert sum(len(group.rows) for group in groups) == len(plan.search.verdicts)
    assert sum(row.chosen for group in groups for row in group.rows) == 1


def test_relaxations_come_by_gain() -> None:
    gains = [row.gain_fraction for row in report_data(example_plan()).relaxations]
    assert gains == [0.05, 0.029, None]


def test_warnings_name_what_the_figures_rest_on() -> None:
    plan = example_plan()
    analytic = " ".join(warnings(replace(plan, profile=replace(plan.profile, source="analytic", notes=("a", "b")))))
    assert "nothing was measured" in analytic and "2 costs are interpolated" in analytic
    bare = replace(plan, profile=replace(plan.profile, notes=()), search=replace(plan.search, verdicts=()))
    assert warnings(bare) == []
    over = replace(bare, memory=(replace(plan.memory[0], limit_bytes=plan.memory[0].peak_bytes - 1), *plan.memory[1:]))
    assert "needed on rank 0: this plan does not fit" in warnings(over)[0]
    tight = replace(bare, memory=tuple(replace(r, limit_bytes=r.peak_bytes + 1) for r in plan.memory[:2]))
    assert warnings(tight) == ["Memory is nearly full on ranks 0, 1: 0.0 % left at the least."]


def test_unproved_plan_shows_its_gap() -> None:
    plan = example_plan()
    open_ = replace(plan, search=replace(plan.search, status="feasible", gap_fraction=0.021))
    assert "2.1 %" in headline(open_).proof
    assert not headline(open_).proved


def test_plan_without_verdicts_baselines_and_relaxations_is_drawn() -> None:
    plan = example_plan()
    bare = replace(
        plan, baselines=(), alternatives=(), search=replace(plan.search, verdicts=(), limits=(), relaxations=())
    )
    data = report_data(bare)
    assert data.verdicts == () and len(data.baselines) == 1


def test_trace_names_every_rank_and_holds_every_action() -> None:
    plan = example_plan()
    events = chrome_trace(plan)["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name" and e["pid"] == 1}
    assert len(names) == 8 and names[1] == "rank 1: image_encoder 26-31, audio_encoder 0-11, text_decoder 0-4"
    blocks = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    assert len(blocks) == 8 * 32 * 2
    after = [e for e in events if e["ph"] == "X" and e["pid"] == 2]
    assert [e["name"] for e in after] == ["gradient reduction", "optimizer"]
    assert after[-1]["ts"] + after[-1]["dur"] == pytest.approx(plan.step.total_us, rel=1e-6)

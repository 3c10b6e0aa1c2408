"""The first steps of a training, compared with its plan."""

from dataclasses import replace

from made_plans import TWO, make_plan

from mindspeed_autoparallel.runtime.features.apply_plan.check import comparison, crowding, settled_us
from mindspeed_autoparallel.spec.plan_records import DataRecord
from mindspeed_autoparallel.units import MIB


def test_the_first_steps_do_not_count():
    assert settled_us([900.0, 500.0, 120.0, 100.0, 110.0]) == 110.0
    assert settled_us([100.0]) == 100.0


def test_processes_that_share_cores_get_the_note_that_times_are_not_comparable():
    assert crowding(2, 2) == ""
    assert "4 processes share 2 cores" in crowding(4, 2)


def test_the_comparison_shows_the_worst_rank_of_each_stage():
    ranks = [
        {"step_us": 900.0, "peak_bytes": 100 * MIB, "steps_us": [2500.0, 900.0, 700.0]},
        {"step_us": 800.0, "peak_bytes": 50 * MIB, "steps_us": [800.0]},
    ]
    text = comparison(make_plan(TWO), ranks)
    assert "(timed steps: 0.7 to 2.5 ms)" in text
    assert "+11.1 %" in text
    assert "+0.0 %" in text
    assert "+100.0 %" in text


def test_plans_for_drawn_samples_are_compared_with_a_note_on_their_peaks():
    """The peak of the mean sample stood beside that of real samples, as an error of the prediction."""
    ranks = [{"step_us": 1200.0, "step_spread": 0.0, "peak_bytes": 120 * MIB, "steps_us": [1200.0]}] * 2
    drawn = DataRecord(
        sha256="",
        num_draws=2,
        padding="longest",
        is_balanced=False,
        by_means_us=1000.0,
        mean_us=1100.0,
        p50_us=1100.0,
        p95_us=1300.0,
        balanced_mean_us=1100.0,
        packed_mean_us=1100.0,
        imbalance=1.0,
        oom_probability=0.0,
        oom_steps=1,
        worst_bytes=150 * MIB,
        worst_rank=1,
    )
    plan = make_plan(TWO)
    assert "samples differ" not in comparison(plan, ranks)
    *_, last = comparison(replace(plan, data=drawn), ranks).splitlines()
    assert "peaks are those of the mean sample" in last and "need 150.0 MiB on rank 1 of the pipeline" in last

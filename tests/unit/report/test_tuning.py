"""The result of a tuning run for people: why the first is first, what limits each, what was left out."""

import pytest
from example_pages import tuned_configuration, tuning_result

from mindspeed_autoparallel.report.tuning import MISSING_AFTER, render_table, render_tuning_page
from mindspeed_autoparallel.runtime.features.auto_tuning.launches import PURPOSES
from mindspeed_autoparallel.runtime.launch.outcome import LaunchStatus


def plan(number, step_ms, interval, **more):
    return {**tuned_configuration(number, step_ms), "step_time_interval_ms": interval, "take_out": [], **more}


@pytest.fixture
def result():
    top = [plan(1, 100.0, [90, 110]), plan(2, 105.0, [95, 115]), plan(3, 150.0, [140, 160])]
    return {**tuning_result(), "top": top}


def shown_page(result):
    """Return the page without what is embedded for its script."""
    return render_tuning_page(result).split("<script")[0]


@pytest.fixture(params=[render_table, shown_page])
def shown(request):
    return request.param


@pytest.mark.parametrize("status", [status.value for status in LaunchStatus if status is not LaunchStatus.OK])
@pytest.mark.parametrize("purpose", sorted(PURPOSES))
def test_no_answer_hides_a_launch_that_failed(result, shown, purpose, status):
    result["launches"] = [
        {"id": "trace-1", "purpose": "trace", "status": "ok"},
        {"id": f"{purpose}-2", "purpose": purpose, "status": status},
    ]
    page = shown(result)
    assert f"launch {purpose}-2 ended with {status}: {MISSING_AFTER[purpose]}" in page
    assert "trace-1" not in page


def test_the_text_has_the_lag_and_the_limits_of_each_configuration(result, shown):
    text = shown(result)
    assert "2 is 5.0% slower, 3 is 50.0% slower" in text
    assert text.count("bubble: ranks waiting for others: 10.0% of the step") == 3
    assert "needs an Ascend NPU" in text
    assert "1 launch on cpu" in text


def test_intervals_that_overlap_are_a_reason_to_verify_until_it_was_done(result, shown):
    assert "the intervals of 1, 2 overlap: --auto-tuning-verify" in shown(result)
    failed = {"number": 1, "status": "failed", "reason": "failed on node 1 after 3 s\n    the last line"}
    text = shown({**result, "verified": [failed]})
    assert "overlap" not in text
    assert "1. not verified: failed on node 1 after 3 s" in text
    assert "the last line" in text
    assert "?" not in render_table({**result, "verified": [failed]})


def test_one_configuration_is_compared_with_nothing(result, shown):
    text = shown({**result, "top": result["top"][:1]})
    assert "slower" not in text.replace("proved slower", "")
    assert "overlap" not in text.replace("overlap of", "")


def test_the_first_configuration_is_compared_with_the_unchanged_script(result, shown):
    assert "your script as it is (PP4 TP1) takes 125.0 ms by the same prediction: 1 takes 20.0% less" in shown(result)
    same = {**result["as_given"], "step_time_ms": 100.0}
    assert "nothing faster was found" in shown({**result, "as_given": same})
    large = {**result["as_given"], "fits": False, "peak_bytes": 3 * 2**30}
    assert "does not fit: it needs 3.0 GiB of 2.0 GiB" in shown({**result, "as_given": large})
    text = shown({**result, "as_given": {"reason": "its TP 3 does not divide 4 devices"}})
    assert "your script as it is was not predicted: its TP 3 does not divide 4 devices" in text.replace("&#x27;", "'")


def test_the_proof_is_stated(result, shown):
    assert "proved by this prediction: nothing that was searched is faster than 1" in shown(result)
    search = {**result["search"], "lower_bound_ms": 90.0}
    assert "not proved: nothing can be faster than 90.0 ms, which is 10.0% below 1" in shown(
        {**result, "search": search}
    )


def test_flags_that_pasting_does_not_undo_are_to_be_taken_out(result, shown):
    first = {**result["top"][0], "take_out": ["--recompute-granularity", "full"]}
    text = shown({**result, "top": [first, *result["top"][1:]]})
    assert text.count("and remove from your command: --recompute-granularity full") == 1


def test_flags_are_quoted_for_a_shell(result, shown):
    first = {**result["top"][0], "argv": ["--pipeline-model-parallel-layout", "Et*3|t*1L"]}
    text = shown({**result, "top": [first]}).replace("&#x27;", "'")
    assert "--pipeline-model-parallel-layout 'Et*3|t*1L'" in text


def measured(number, error, note=""):
    return {
        "number": number,
        "status": "ok",
        "measured_step_ms": 50.0,
        "predicted_step_ms": 50.0 * (1 + error),
        "step_error": error,
        "measured_peak_bytes": 2**30,
        "predicted_peak_bytes": 2**30,
        "memory_error": 0.0,
        "note": note,
    }


def test_the_fastest_configuration_by_measurement_is_named(result, shown):
    items = [measured(1, -0.5), measured(2, 0.0), measured(3, 0.5)]
    line = "by these runs: 3 is the fastest (100.0 ms), 2 is 5.0% slower, 1 is 100.0% slower"
    assert line in shown({**result, "verified": items})
    reduced = [measured(1, -0.5, "run with DP 2 in place of 4"), *items[1:]]
    assert f"corrected {line}" in shown({**result, "verified": reduced})
    crowded = [measured(1, -0.5, "4 processes share 2 cores: the step time is not comparable"), *items[1:]]
    for few in (crowded, items[:1]):
        assert "these runs" not in shown({**result, "verified": few})

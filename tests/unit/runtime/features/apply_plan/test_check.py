"""What a training's first steps say about its plan."""

from mindspeed_autoparallel.runtime.features.apply_plan.check import settled_us


def test_the_first_steps_do_not_count():
    assert settled_us([900.0, 500.0, 120.0, 100.0, 110.0]) == 110.0
    assert settled_us([100.0]) == 100.0

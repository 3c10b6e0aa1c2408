"""What the host adds to a step is found from steps of two lengths."""

from dataclasses import replace

import pytest

from mindspeed_autoparallel.planner.tuner.stages import StepCost, fit_steps
from mindspeed_autoparallel.profiles.records import PointResult, StepsRecord, record_of


def measured(per_microbatch, per_step, num_microbatches=4, finalize=70.0, optimizer=300.0):
    blocks = {
        "pre": {"forward_us": 10.0, "backward_us": 20.0},
        "layer": {"forward_us": 100.0, "backward_us": 200.0},
        "post": {"forward_us": 30.0, "backward_us": 40.0},
    }
    microbatch = 10 + 20 + 2 * (100 + 200) + 30 + 40 + per_microbatch

    def step(number):
        return number * microbatch + finalize + optimizer + per_step

    values = {
        "modules": [{"name": "text", "kinds": [0, 0], "blocks": blocks}],
        "optimizer": {"step_us": optimizer, "finalize_us": finalize},
        "steps": {"one_us": step(1), "many_us": step(num_microbatches), "num_microbatches": num_microbatches},
    }
    return record_of(values, "measured", PointResult)


def test_both_costs_of_the_host_are_found():
    assert fit_steps([measured(25.0, 500.0)]) == StepCost(per_microbatch_us=25.0, per_step_us=500.0)


def test_the_middle_of_several_layouts_counts():
    found = fit_steps([measured(25.0, 500.0), measured(35.0, 900.0), measured(20.0, 9e6)])
    assert (found.per_microbatch_us, found.per_step_us) == pytest.approx((25.0, 900.0))


def test_a_step_faster_than_its_blocks_costs_nothing():
    assert fit_steps([measured(-50.0, -100.0)]) == StepCost()


def test_without_whole_steps_there_is_no_step_cost():
    assert fit_steps([]) is None
    assert fit_steps([replace(measured(1.0, 1.0), steps=StepsRecord())]) is None

"""What the planner predicts for its plans, against Megatron's schedule on the emulated device."""

import functools

import pytest
from emulated_device.launching import run_on_emulated_device
from emulated_device.plans import MORE, PAIRED, WANTED, planned, predicted_activation_peaks
from how_many import how_many

pytestmark = [pytest.mark.emulated, pytest.mark.megatron]


@functools.cache
def plans_and_outcomes():
    pytest.importorskip("megatron.core")
    plans = [planned(wanted) for wanted in (*WANTED, *MORE[: how_many(0, len(MORE))], *PAIRED)]
    found = iter(run_on_emulated_device([case for item in plans for case in item.cases]))
    return [(item, [next(found) for _ in item.cases]) for item in plans]


def test_the_plans_are_of_many_kinds():
    plans = [item.plan for item, _ in plans_and_outcomes()]
    assert len(plans) >= 20
    assert {plan.layout.pipeline_size for plan in plans} == {1, 2, 3, 4}
    assert {plan.layout.virtual_size for plan in plans} == {1, 2, 3}
    assert sum(any(stage.recompute for stage in plan.stages) for plan in plans) >= 6


def test_predicted_pipeline_time_is_the_devices():
    for item, outcomes in plans_and_outcomes():
        measured_us = sum(outcome.pipeline_ns for outcome in outcomes) / len(outcomes) / 1000
        assert item.plan.step.pipeline_us == pytest.approx(measured_us, rel=1e-6), item.wanted


def test_predicted_step_with_reduction_and_optimizer_is_close():
    errors = []
    for item, outcomes in plans_and_outcomes():
        measured_us = sum(outcome.step_ns for outcome in outcomes) / len(outcomes) / 1000
        errors.append(abs(item.plan.step.total_us / measured_us - 1))
    assert sum(errors) / len(errors) <= 0.01
    assert max(errors) <= 0.02


def test_predicted_peak_of_activations_is_the_devices():
    for item, outcomes in plans_and_outcomes():
        for outcome in outcomes:
            assert outcome.peak_bytes == predicted_activation_peaks(item), item.wanted
            assert not any(outcome.held_bytes)

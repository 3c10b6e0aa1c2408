"""Steps over drawn samples, slowest replica included, against Megatron's schedule on the emulated device."""

import sys
from pathlib import Path

import pytest
from emulated_device.launching import run_on_emulated_device
from emulated_device.samples import distribution_of, drawn_steps

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks" / "data"))
from shapes import SHAPES

pytestmark = [pytest.mark.emulated, pytest.mark.megatron]
NUM_STEPS = 4


def test_predicted_steps_of_drawn_samples_are_the_devices():
    pytest.importorskip("megatron.core")
    steps = [step for draw in SHAPES.values() for step in drawn_steps(distribution_of(draw(2_000, 0)), NUM_STEPS)]
    found = iter(run_on_emulated_device([case for step in steps for case in step.cases]))
    predicted = [step.predicted_us for step in steps]
    # The samples differ enough to tell: no two steps of a shape are alike.
    assert len({round(us) for us in predicted}) == len(predicted)
    for step in steps:
        device_us = max(next(found).step_ns for _ in step.cases) / 1000
        assert step.predicted_us == pytest.approx(device_us, rel=0.02)

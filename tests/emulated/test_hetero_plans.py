"""Hetero steps as planned, against ``runtime.hetero`` itself around Megatron's schedule on the emulated device."""

from __future__ import annotations

import functools

import pytest
from emulated_device.hetero_plans import (
    LOADS,
    PP4,
    TP2_PP2,
    Variant,
    forced,
    forced_data_parallel,
    hetero_plan,
    measured_us,
    ways,
)
from emulated_device.launching import run_hetero

pytestmark = [pytest.mark.emulated, pytest.mark.megatron, pytest.mark.torch]


@functools.cache
def planned_and_measured() -> dict[str, dict[str, tuple[Variant, float]]]:
    """By load and way: the plan, and its step on the device in microseconds."""
    pytest.importorskip("megatron.core")
    chosen = [(load, way) for load in LOADS for way in ways(load)]
    found: dict[str, dict[str, tuple[Variant, float]]] = {load.name: {} for load in LOADS}
    for (load, way), step_us in zip(chosen, measured_us(chosen), strict=True):
        found[load.name][way.name] = (way, step_us)
    return found


def test_predicted_step_of_every_way_is_the_devices() -> None:
    for load, found in planned_and_measured().items():
        for name, (way, step_us) in found.items():
            assert way.predicted_us == pytest.approx(step_us, rel=1e-6), (load, name)


def test_speed_up_of_hetero_is_predicted_within_two_percent() -> None:
    for load, found in planned_and_measured().items():
        way, step_us = found["ViT DP4, hetero"]
        for other in ("ViT TP2, LLM TP2-PP2", "ViT as stages of PP4"):
            predicted, measured = found[other][0].predicted_us / way.predicted_us, found[other][1] / step_us
            assert predicted == pytest.approx(measured, rel=0.02), (load, other)
            assert measured > 1.0, (load, other)


def test_odd_scales_both_memory_modes_and_slow_transfers_are_predicted() -> None:
    load = LOADS[1]
    choices = forced(load, [hetero_plan(load, 1, layouts=[layout]) for layout in (TP2_PP2, PP4)])
    measured = run_hetero([choice.case() for choice in choices])
    for choice, step_ns in zip(choices, measured, strict=True):
        assert choice.predicted_us() == pytest.approx(step_ns / 1000, rel=1e-6), choice


def test_data_parallel_backbones_and_replicas_over_two_of_them_are_predicted() -> None:
    pytest.importorskip("megatron.core")
    choices = forced_data_parallel(LOADS[1])
    measured = run_hetero([choice.case() for choice in choices])
    for choice, step_ns in zip(choices, measured, strict=True):
        # The device charges inputs that travel; the profile here gives them no bytes.
        spans_two = choice.tensor_size > choice.plan.layout.tensor_size
        assert choice.predicted_us() == pytest.approx(step_ns / 1000, rel=5e-3 if spans_two else 1e-6), choice

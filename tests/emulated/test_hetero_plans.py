"""Hetero steps as planned, against ``runtime.hetero`` itself around Megatron's schedule on the emulated device."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from emulated_device.hetero_forced import (
    Forced,
    forced,
    forced_data_parallel,
    forced_generators,
    forced_stages,
    forced_window,
)
from emulated_device.hetero_plans import LOADS, PP4, TP2_PP2, Variant, hetero_plan, measured_us, ways
from emulated_device.launching import run_hetero
from how_many import how_many

pytestmark = [pytest.mark.emulated, pytest.mark.megatron, pytest.mark.torch]
EIGHT = replace(LOADS[1], global_batch_size=8)
"""Fewer samples, of which every odd scale still leaves a remainder."""


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


@functools.cache
def forced_and_measured() -> list[tuple[Forced, float]]:
    """Choices that no search would make, and their steps on the device in microseconds; one launch."""
    pytest.importorskip("megatron.core")
    choices = [
        *forced(EIGHT, [hetero_plan(EIGHT, 1, layouts=[layout]) for layout in (TP2_PP2, PP4)]),
        *forced_data_parallel(LOADS[1]),
        *forced_stages(EIGHT)[::2],
        *forced_window(EIGHT)[::2],
    ]
    choices += [replace(choice, sequential=True) for choice in choices[:6]]
    measured = run_hetero([choice.case() for choice in choices])
    return [(choice, step_ns / 1000) for choice, step_ns in zip(choices, measured, strict=True)]


def test_odd_scales_memory_modes_own_pipelines_and_slow_transfers_are_predicted() -> None:
    for choice, step_us in forced_and_measured():
        if not choice.sequential:
            # Where replicas are tied, the exchange of sizes is priced; the device does not emulate it.
            rel = 5e-4 if choice.inputs_travel else 1e-6
            assert choice.predicted_us() == pytest.approx(step_us, rel=rel), choice


def test_steps_with_a_generator_of_its_own_layout_are_predicted() -> None:
    pytest.importorskip("megatron.core")
    choices = forced_generators(EIGHT)[:: how_many(2, 1)]  # every second has every plan and every choice
    measured = run_hetero([choice.case() for choice in choices], timeout_s=580)
    for choice, step_ns in zip(choices, measured, strict=True):
        rel = 5e-4 if choice.inputs_travel else 1e-6
        assert choice.predicted_us() == pytest.approx(step_ns / 1000, rel=rel), choice


def test_hidden_transfers_make_no_step_slower_and_some_faster() -> None:
    found = forced_and_measured()
    waited = [(choice, step_us) for choice, step_us in found if choice.sequential]
    gains = [step_us / hidden_us for (_, step_us), (_, hidden_us) in zip(waited, found, strict=False)]
    assert min(gains) >= 1.0
    assert max(gains) > 1.02, gains

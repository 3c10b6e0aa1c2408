"""Hetero plans of random small models against enumeration: times, memory, frozen encoders, two encoders."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hetero_enumeration import enumerated
from hypothesis import example, given, settings
from hypothesis import strategies as st
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.profiles import Measurement, ModuleCost, Profile, StateBytes
from mindspeed_autoparallel.spec import Cluster, Module

NUM_LAYERS = 3


def random_profile(
    capacity_mib: int,
    image_us: int,
    audio_us: int | None,
    text_us: int,
    saved_mib: int,
    tensor_gain: float,
    frozen: bool,
) -> Profile:
    profile = small_profile(capacity_mib=capacity_mib)
    image, text = profile.model.modules
    modules = [image, replace(text, num_layers=NUM_LAYERS)]
    if audio_us is not None:
        modules.insert(1, Module(name="audio_encoder", result_key="audio", num_layers=1))
    measurements = []
    for m in profile.measurements:
        gain = tensor_gain if m.at.tensor_size == 2 else 1.0
        layer = block(image_us / gain, saved_mib=saved_mib)
        if frozen:
            plain = replace(layer.recompute["none"], saved_bytes=0)
            layer = replace(
                layer,
                backward_us=0.0,
                dense=StateBytes(num_parameters=1, parameter_bytes=2**20),
                recompute={"none": plain},
            )
        costs = {
            "image_encoder": ModuleCost(layer=layer),
            "text_decoder": replace(
                m.modules["text_decoder"], layer=block(text_us / gain, saved_mib=30, recomputable=True)
            ),
        }
        if audio_us is not None:
            costs["audio_encoder"] = ModuleCost(layer=block(audio_us / gain, saved_mib=3))
        measurements.append(Measurement(at=m.at, modules=costs))
    return replace(profile, model=replace(profile.model, modules=tuple(modules)), measurements=tuple(measurements))


@example(120, 50, None, 200, 29, 1.05, False, 4, 4)
@example(500, 2000, 300, 1000, 20, 1.5, True, 4, 4)
@settings(max_examples=60, deadline=None)
@given(
    capacity=st.integers(120, 600),
    image_us=st.integers(50, 4000),
    audio_us=st.none() | st.integers(20, 900),
    text_us=st.integers(200, 2000),
    saved_mib=st.integers(2, 40),
    tensor_gain=st.sampled_from([1.05, 1.5, 2.0]),
    frozen=st.booleans(),
    batch=st.sampled_from([2, 4]),
    devices=st.sampled_from([1, 2, 4]),
)
def test_no_hetero_plan_beats_the_search_or_its_bound(
    capacity: int,
    image_us: int,
    audio_us: int | None,
    text_us: int,
    saved_mib: int,
    tensor_gain: float,
    frozen: bool,
    batch: int,
    devices: int,
) -> None:
    profile = random_profile(capacity, image_us, audio_us, text_us, saved_mib, tensor_gain, frozen)
    cluster = Cluster(num_nodes=1, devices_per_node=devices)
    best = enumerated(profile, cluster, batch)
    try:
        plan = search_hetero(profile, cluster, batch, memory_modes=SUMMED_MODES)
    except InfeasiblePlan as error:
        assert best == float("inf") or "(not proved)" in str(error)
        return
    assert plan.search.lower_bound_us <= best * (1 + 1e-9)
    assert best <= plan.step.total_us * (1 + 1e-9)
    # Distance allowed only as far as the plan itself admits it.
    assert plan.step.total_us * (1 - plan.search.gap_fraction) <= best * (1 + 1e-6)
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)


@pytest.mark.parametrize(
    "numbers",
    [
        # Rows of the split problem alone leave 4.4 % here, and its best plan is 1.1 % slower than the best there is.
        (165, 2343, 116, 292, 35, 1.05, False, 2, 2),
        (120, 50, None, 200, 29, 1.05, False, 4, 4),
    ],
)
def test_where_encoders_nearly_fill_a_device_the_best_plan_is_found_and_proved(numbers: tuple[Any, ...]) -> None:
    *model, batch, devices = numbers
    profile, cluster = random_profile(*model), Cluster(num_nodes=1, devices_per_node=devices)
    best = enumerated(profile, cluster, batch)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlan) as raised:
            search_hetero(profile, cluster, batch, memory_modes=SUMMED_MODES)
        assert "not proved" not in str(raised.value)
        return
    plan = search_hetero(profile, cluster, batch, memory_modes=SUMMED_MODES)
    assert plan.step.total_us == pytest.approx(best, rel=1e-6)
    assert plan.search.gap_fraction < 1e-4

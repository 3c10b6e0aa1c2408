"""Encoders too large for one device get a pipeline of their own; mode window where it is worth it."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hetero_enumeration import enumerated
from small_profile import small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import EncoderSpace, search_hetero
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.profiles import Profile, StateBytes
from mindspeed_autoparallel.runtime.features.apply_plan.hetero_model import can_stage_encoders, hetero_model
from mindspeed_autoparallel.runtime.hetero.layouts import read_layout
from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.spec import Cluster, Layout, ModuleLayout
from mindspeed_autoparallel.spec.hetero import EncoderMemory, EncoderPhase, HeteroRecord
from mindspeed_autoparallel.units import MIB

FOUR = Cluster(num_nodes=1, devices_per_node=4)


def heavy_encoder() -> Profile:
    """Layers whose gradients alone fill a third of a device."""
    profile = small_profile(capacity_mib=600)
    state = StateBytes(
        num_parameters=MIB, parameter_bytes=100 * MIB, gradient_bytes=200 * MIB, optimizer_bytes=12 * MIB
    )
    measurements = []
    for measurement in profile.measurements:
        image = measurement.modules["image_encoder"]
        image = replace(image, layer=replace(image.layer, dense=state))
        measurements.append(replace(measurement, modules={**measurement.modules, "image_encoder": image}))
    return replace(profile, measurements=tuple(measurements))


def test_an_encoder_that_no_device_holds_gets_stages_of_its_own() -> None:
    with pytest.raises(InfeasiblePlan):
        search_hetero(heavy_encoder(), FOUR, 8, encoder_space=EncoderSpace(pipeline_sizes=(1,)))
    plan = search_hetero(heavy_encoder(), FOUR, 8, memory_modes=SUMMED_MODES)
    assert plan.hetero is not None
    (phase,) = plan.hetero.encoders
    assert phase.layout.pipeline_size == 2
    assert phase.stage_layers == (1, 1)
    assert plan.step.total_us == pytest.approx(enumerated(heavy_encoder(), FOUR, 8), rel=1e-3)
    assert "image_encoder PP2" in plan.layout.label()


def test_its_stages_are_written_to_model_json_and_read_by_the_training(tmp_path: Path) -> None:
    content = {
        "image_encoder": {
            "vision_encoder": {"num_layers": 2, "sp": True, "tp": 2},
            "vision_projector": {"num_layers": 1},
        },
        "text_decoder": {"num_layers": 4},
    }
    (tmp_path / "model.json").write_text(json.dumps(content))
    description = describe(argparse.Namespace(mm_model=str(tmp_path / "model.json")))
    assert can_stage_encoders(description)
    written = hetero_model(search_hetero(heavy_encoder(), FOUR, 8), description)
    (encoder,) = read_layout(written, world_size=4).encoders
    assert (encoder.pipeline_size, encoder.sequence_parallel) == (2, False)
    assert written["image_encoder"]["vision_encoder"]["pipeline_num_layers"] == [1, 1]


def test_encoders_of_unknown_adapters_are_not_cut(tmp_path: Path) -> None:
    content = {
        "image_encoder": {"num_layers": 2, "tp": 1, "hetero": {"adapter": "mine:Encoder"}},
        "text_decoder": {"num_layers": 4},
    }
    (tmp_path / "model.json").write_text(json.dumps(content))
    assert not can_stage_encoders(describe(argparse.Namespace(mm_model=str(tmp_path / "model.json"))))


def test_window_is_taken_where_recomputing_costs_more() -> None:
    profile = small_profile(capacity_mib=300)
    plan, without = search_hetero(profile, FOUR, 8), search_hetero(profile, FOUR, 8, memory_modes=SUMMED_MODES)
    assert plan.hetero is not None
    assert plan.hetero.memory == "window"
    assert plan.step.total_us < 0.99 * without.step.total_us
    assert plan.search.lower_bound_us <= without.search.lower_bound_us
    assert plan.search.gap_fraction < 0.02, "the bound covers every choice in this mode"
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)


def test_a_rank_holds_its_own_stage_of_an_encoder() -> None:
    small, large = EncoderMemory(state_bytes=3, kept_bytes=4, transient_bytes=5), EncoderMemory(state_bytes=30)
    phase = EncoderPhase(
        module="image_encoder",
        layout=ModuleLayout(pipeline_size=2, data_size=2),
        num_macro_batches=1,
        samples=1,
        forward_us=0.0,
        backward_us=0.0,
        exchange_us=0.0,
        reduction_us=0.0,
        optimizer_us=0.0,
        moved_bytes=0,
        state_bytes=30,
        kept_bytes=0,
        transient_bytes=5,
        first_stage_bytes=0,
        stage_layers=(1, 1),
        stage_memory=(small, large),
    )
    whole = replace(phase, stage_layers=(), stage_memory=(), kept_bytes=1)
    record = HeteroRecord(memory="upfront", balance="local", encoders=(phase,))
    assert [record.memory_on(stage, 2) for stage in range(2)] == [small, large]
    assert record.memory_on(0, 1) == large, "both stages share the backbone's ranks: the fullest"
    assert [record.memory_on(stage, 4) for stage in range(4)] == [small, small, large, large]
    # Stage 1 of 3 has a half of each of two.
    assert [record.memory_on(stage, 3) for stage in range(3)] == [small, large, large]
    both = HeteroRecord(memory="upfront", balance="local", encoders=(phase, whole))
    assert both.memory_on(0, 2) == EncoderMemory(state_bytes=33, kept_bytes=5, transient_bytes=5)
    assert both.reserved_bytes == 61, "the search counts the fullest"


def test_stages_of_the_plan_hold_what_their_ranks_have() -> None:
    profile = small_profile(capacity_mib=2000)
    measurements = []
    for measurement in profile.measurements:
        image = measurement.modules["image_encoder"]
        assert image.pre is not None
        pre = replace(image.pre, recompute={"none": replace(image.pre.recompute["none"], saved_bytes=20 * MIB)})
        measurements.append(
            replace(measurement, modules={**measurement.modules, "image_encoder": replace(image, pre=pre)})
        )
    plan = search_hetero(
        replace(profile, measurements=tuple(measurements)),
        FOUR,
        8,
        SearchOptions(layouts=[Layout(pipeline_size=4)]),
        memory_modes=["upfront"],
        encoder_space=EncoderSpace(pipeline_sizes=(2,)),
    )
    assert plan.hetero is not None
    (phase,) = plan.hetero.encoders
    first, last = phase.stage_memory
    assert first.kept_bytes == phase.kept_bytes > last.kept_bytes
    assert [rank.terms["encoder_activations"] for rank in plan.memory] == [first.kept_bytes] * 2 + [last.kept_bytes] * 2
    assert all(sum(rank.terms.values()) == rank.peak_bytes for rank in plan.memory)


def test_a_recomputed_encoder_keeps_its_measured_inputs() -> None:
    profile = small_profile(capacity_mib=2000)
    measurements = [
        replace(m, modules={**m.modules, "image_encoder": replace(m.modules["image_encoder"], input_bytes=7 * MIB)})
        for m in profile.measurements
    ]
    plan = search_hetero(
        replace(profile, measurements=tuple(measurements)),
        FOUR,
        8,
        SearchOptions(layouts=[Layout(pipeline_size=4)]),
        memory_modes=["recompute"],
        encoder_space=EncoderSpace(tensor_sizes={"image_encoder": [1]}, pipeline_sizes=(1,)),
    )
    assert plan.hetero is not None
    (phase,) = plan.hetero.encoders
    assert phase.kept_bytes == 2 * 7 * MIB, "8 samples over 4 replicas"


def test_a_replica_that_gets_no_sample_holds_none() -> None:
    plan = search_hetero(
        small_profile(capacity_mib=2000),
        FOUR,
        2,
        SearchOptions(layouts=[Layout(pipeline_size=4)]),
        memory_modes=["upfront"],
        encoder_space=EncoderSpace(tensor_sizes={"image_encoder": [1]}, pipeline_sizes=(1,)),
    )
    assert plan.hetero is not None
    (phase,) = plan.hetero.encoders
    assert phase.layout.micro_batch_scale == 2
    assert phase.kept_bytes > 0
    assert [rank.terms["encoder_activations"] for rank in plan.memory] == [phase.kept_bytes] * 2 + [0] * 2

"""The hetero search against enumeration of every choice, and its error if nothing fits."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hetero_enumeration import enumerated
from small_profile import small_profile

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.hetero.backbone import backbone_profile
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import EncoderSpace, search_hetero
from mindspeed_autoparallel.planner.hetero.space import costs_of
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.spec import Cluster, Layout, Module
from mindspeed_autoparallel.units import MIB

FOUR = Cluster(num_nodes=1, devices_per_node=4)


@pytest.mark.parametrize("capacity_mib", [1000, 420, 330, 270, 240, 220, 200])
@pytest.mark.parametrize("batch", [4, 8])
def test_search_equals_enumeration_of_all_layouts_scales_modes_and_placements(capacity_mib: int, batch: int) -> None:
    profile = small_profile(capacity_mib=capacity_mib)
    best = enumerated(profile, FOUR, batch)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlan):
            search_hetero(profile, FOUR, batch)
        return
    plan = search_hetero(profile, FOUR, batch, memory_modes=SUMMED_MODES)
    assert plan.search.lower_bound_us <= best * (1 + 1e-9) <= plan.step.total_us * (1 + 2e-9)
    # Distance allowed only as far as the plan itself admits it.
    assert plan.step.total_us <= best / (1 - plan.search.gap_fraction) * (1 + 1e-9)
    assert plan.search.gap_fraction < 1e-3
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)
    assert all(sum(rank.terms.values()) == rank.peak_bytes for rank in plan.memory)


@pytest.mark.parametrize("capacity_mib", [1000, 400, 300, 250])
@pytest.mark.parametrize("link_bytes_per_s", [1e11, 2e9])
def test_search_with_a_generator_equals_enumeration(capacity_mib: int, link_bytes_per_s: float) -> None:
    profile = small_profile(capacity_mib=capacity_mib, generator_layers=1)
    tier = profile.device.intra
    slow = replace(tier, default=replace(tier.default, bytes_per_s=link_bytes_per_s))
    profile = replace(profile, device=replace(profile.device, intra=slow, inter=slow))
    best = enumerated(profile, FOUR, 4)
    if best == float("inf"):
        with pytest.raises(InfeasiblePlan):
            search_hetero(profile, FOUR, 4, memory_modes=SUMMED_MODES)
        return
    plan = search_hetero(profile, FOUR, 4, memory_modes=SUMMED_MODES)
    assert plan.search.lower_bound_us <= best * (1 + 1e-9) <= plan.step.total_us * (1 + 2e-9)
    assert plan.step.total_us <= best / (1 - plan.search.gap_fraction) * (1 + 1e-9)
    assert plan.search.gap_fraction < 1e-3
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in plan.memory)


def test_a_generators_own_layout_wins_where_one_stage_would_be_too_long() -> None:
    profile = small_profile(generator_layers=1, generator_us=6000)
    pipelines = SearchOptions(layouts=[Layout(pipeline_size=2, data_size=2), Layout(pipeline_size=4)])
    plan = search_hetero(profile, FOUR, 8, pipelines)
    assert "image_generator" in plan.layout.modules
    assert plan.layout.meets
    inside = search_hetero(profile, FOUR, 8, pipelines, encoder_space=EncoderSpace(generator=False))
    assert "image_generator" not in inside.layout.modules
    assert plan.step.total_us < inside.step.total_us
    again, _ = replay(plan)
    assert again.step.total_us == pytest.approx(plan.step.total_us)


@pytest.mark.parametrize("why", ["no context size of its own", "more stages than microbatches"])
def test_a_generator_that_has_no_layout_of_its_own_is_planned_in_the_pipeline(why: str) -> None:
    profile, pipelines, batch = small_profile(generator_layers=1), None, 4
    if why == "no context size of its own":
        at = [replace(one, at=replace(one.at, context_size=2)) for one in profile.measurements]
        profile = replace(profile, measurements=tuple(at))
    else:
        pipelines, batch = [Layout(pipeline_size=4)], 2
    plan = search_hetero(profile, FOUR, batch, SearchOptions(layouts=pipelines))
    assert "image_generator" not in plan.layout.modules
    assert plan.layers_of("image_generator")[-1] == 1


@pytest.mark.parametrize("capacity_mib", [130, 170, 230])
def test_virtual_stages_beside_encoders_are_searched_without_a_request(capacity_mib: int) -> None:
    profile = small_profile(capacity_mib=capacity_mib)
    tier = profile.device.intra
    slow = replace(tier, default=replace(tier.default, bytes_per_s=2e9))
    one_rank = tuple(measured for measured in profile.measurements if measured.at.tensor_size == 1)
    profile = replace(profile, device=replace(profile.device, intra=slow, inter=slow), measurements=one_rank)
    plan = search_hetero(profile, FOUR, 4)
    assert plan.layout.virtual_size == 2
    assert plan.search.status == "optimal"
    assert plan.step.total_us == pytest.approx(enumerated(profile, FOUR, 4), rel=1e-6)
    alone = search_hetero(profile, FOUR, 4, SearchOptions(space=SpaceOptions(virtual_sizes=(1,))))
    assert plan.step.total_us < alone.step.total_us


def test_with_room_the_plan_is_proved() -> None:
    plan = search_hetero(small_profile(), FOUR, 8, memory_modes=SUMMED_MODES)
    assert plan.search.status == "optimal"
    assert plan.step.total_us == pytest.approx(enumerated(small_profile(), FOUR, 8), rel=1e-6)


def test_recompute_mode_is_chosen_where_kept_activations_do_not_fit() -> None:
    roomy = search_hetero(small_profile(), FOUR, 8, memory_modes=SUMMED_MODES)
    assert roomy.hetero is not None
    assert roomy.hetero.memory == "upfront"
    tight = search_hetero(small_profile(capacity_mib=220), FOUR, 8, memory_modes=SUMMED_MODES)
    assert tight.hetero is not None
    assert tight.hetero.memory == "recompute"


def test_replay_of_the_plan_gives_its_own_figures() -> None:
    plan = search_hetero(small_profile(capacity_mib=330), FOUR, 8)
    again, _ = replay(plan)
    assert again.step.total_us == pytest.approx(plan.step.total_us)
    assert again.memory == plan.memory
    assert again.baselines == plan.baselines
    assert again.search.limits == plan.search.limits


def test_file_round_trip_keeps_the_encoders(tmp_path) -> None:  # type: ignore[no-untyped-def]
    plan = search_hetero(small_profile(), FOUR, 8)
    plan.write(tmp_path / "plan.json")
    assert type(plan).read(tmp_path / "plan.json") == plan


def test_a_model_of_one_module_is_refused_by_name() -> None:
    alone = backbone_profile(small_profile())
    with pytest.raises(ConfigError, match=r"needs an encoder before the backbone.*only text_decoder"):
        search_hetero(alone, FOUR, 8)


def test_sizes_that_were_not_measured_are_named() -> None:
    profile = small_profile()
    only_eight = replace(profile, measurements=(replace(profile.measurements[0], at=MeasuredAt(tensor_size=8)),))
    with pytest.raises(ConfigError, match=r"image_encoder TP8 CP1: 4 devices are not a multiple"):
        search_hetero(only_eight, FOUR, 8)


def test_encoder_sizes_must_divide_its_heads() -> None:
    profile = small_profile()
    modules = (Module(name="image_encoder", result_key="vit", num_layers=2, num_heads=3), profile.model.modules[1])
    odd = replace(profile, model=replace(profile.model, modules=modules))
    costs, reasons = costs_of(odd, modules[0], FOUR)
    assert [cost.point.tensor_size for cost in costs] == [1]
    assert any("3 heads" in reason for reason in reasons)


def test_too_little_memory_is_reported_with_the_encoders_bytes() -> None:
    with pytest.raises(InfeasiblePlan, match=r"encoders alone hold .* on every device"):
        search_hetero(small_profile(capacity_mib=60), FOUR, 8)


def test_a_batch_that_no_layout_divides_is_named() -> None:
    assert search_hetero(small_profile(), FOUR, 3).num_microbatches == 3
    with pytest.raises(ConfigError, match="at least 1"):
        search_hetero(small_profile(), FOUR, 0)


def test_limits_name_the_encoder_where_it_takes_most_of_the_step() -> None:
    profile = small_profile()
    slow = tuple(
        replace(
            m,
            modules={
                **m.modules,
                "image_encoder": replace(
                    m.modules["image_encoder"],
                    layer=replace(m.modules["image_encoder"].layer, forward_us=20_000.0, backward_us=40_000.0),
                ),
            },
        )
        for m in profile.measurements
    )
    plan = search_hetero(replace(profile, measurements=slow), FOUR, 8)
    assert plan.search.limits[0].startswith("time of image_encoder outside the pipeline")
    assert plan.memory[0].limit_bytes == 1000 * MIB

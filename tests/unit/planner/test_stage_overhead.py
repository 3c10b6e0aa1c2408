"""What being cut into stages adds counts where there are several, and bounds stay below what is found."""

from dataclasses import replace

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles.device import StageOverhead
from mindspeed_autoparallel.spec import Cluster, Layout

CLUSTER = Cluster(num_nodes=1, devices_per_node=2)
BATCH = 8


def plan(layout, **device):
    profile = small_profile()
    profile = replace(profile, device=replace(profile.device, **device))
    return search(profile, CLUSTER, BATCH, SearchOptions(layouts=[layout]))


def test_one_stage_has_no_stage_overhead():
    layout = Layout(data_size=2)
    costly = plan(layout, stage_overhead=StageOverhead(first_us=1e4, last_us=1e4), pipeline_step_us=1e5)
    assert costly.step == plan(layout).step


def test_the_end_of_a_pipelines_step_is_longer():
    layout = Layout(pipeline_size=2)
    more_us = plan(layout, pipeline_step_us=700.0).step.total_us - plan(layout).step.total_us
    assert more_us == pytest.approx(700.0)


def test_each_pass_of_a_stage_takes_half_of_what_its_place_adds():
    profile = small_profile()
    overhead = StageOverhead(first_us=20.0, inner_us=1e6, last_us=60.0)
    placement = ModulePlacement(
        layers={"image_encoder": (2, 0), "text_decoder": (1, 3)}, recompute={"image_encoder": {}, "text_decoder": {}}
    )

    def durations(device):
        found = evaluate(replace(profile, device=device), CLUSTER, Layout(pipeline_size=2), placement, BATCH)
        times = {}
        for stage, action, start, end in found.simulated.timeline:
            times[stage, action.kind] = (end - start) / 1000
        return times

    plain, cut = durations(profile.device), durations(replace(profile.device, stage_overhead=overhead))
    more = {key: cut[key] - plain[key] for key in plain}
    assert more == pytest.approx({(0, "F"): 10.0, (0, "B"): 10.0, (1, "F"): 30.0, (1, "B"): 30.0})


def test_inner_stages_are_those_between_the_first_and_the_last():
    overhead = StageOverhead(first_us=1.0, inner_us=2.0, last_us=3.0)
    assert [overhead.at(stage, 4) for stage in range(4)] == [1.0, 2.0, 2.0, 3.0]


def test_messages_of_the_interleaved_schedule_have_their_own_time_where_it_is_known():
    plain, interleaved = Layout(pipeline_size=2), Layout(pipeline_size=2, virtual_size=2, schedule="interleaved")
    one = {"message_overhead_us": 5.0}
    other = {**one, "interleaved_message_overhead_us": 90.0}
    assert plan(plain, **one).step == plan(plain, **other).step
    assert plan(interleaved, **one).step.total_us < plan(interleaved, **other).step.total_us
    same = plan(interleaved, message_overhead_us=90.0).step.total_us
    assert plan(interleaved, **other).step.total_us == pytest.approx(same)


def test_the_bound_stays_below():
    found = plan(
        Layout(pipeline_size=2), stage_overhead=StageOverhead(first_us=9.0, last_us=9.0), pipeline_step_us=50.0
    )
    assert found.search.lower_bound_us <= found.step.total_us


def test_a_negative_overhead_is_refused():
    with pytest.raises(ProfileError, match="must be 0 to"):
        StageOverhead(inner_us=-1.0)

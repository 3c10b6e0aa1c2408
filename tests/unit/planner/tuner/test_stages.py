"""What cutting a model into stages adds is found from pipelines that were run."""

import pytest

from mindspeed_autoparallel.planner.tuner.stages import Modelled, PipelineCost, StepCost, fit_stages
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult
from mindspeed_autoparallel.profiles.records import record_of
from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

STEP = StepCost(per_microbatch_us=40.0, per_step_us=500.0)
LINK_US, BYTES, US_PER_BYTE = 30.0, 2000, 0.25
SENDS = {1: "blocking", 2: "freed"}


def sample(chunks, *, message, passes, end, number=4, replicas=1, tensor=1):
    """A pipeline of two ranks whose blocks take 1000 us forward and 2000 us backward on every stage."""
    forward = [1000.0 + (STEP.per_microbatch_us + more) / 2 for more in passes]
    backward = [2000.0 + (STEP.per_microbatch_us + more) / 2 for more in passes]
    program = make_program("interleaved" if chunks > 1 else "1f1b", 2, number, chunks)
    times = StepTimes(forward=forward, backward=backward, link=[LINK_US + message] * (len(passes) - 1))
    schedule = simulate(program, times, sends=SENDS[chunks]).step_time
    finalize = 70.0 if replicas == 1 else 9000.0
    rest = STEP.per_step_us + US_PER_BYTE * BYTES + end + (finalize if replicas > 1 else 0.0)
    ranks = [
        {
            "stage": stage,
            "schedule_us": schedule,
            "step_us": schedule + rest,
            "finalize_us": finalize,
            "optimizer_us": 1.0,
            "updated_bytes": BYTES,
            "forward_us": [forward[a.chunk * 2 + stage] for a in program[stage] if a.kind == "F"],
            "backward_us": [backward[a.chunk * 2 + stage] for a in program[stage] if a.kind == "B"],
        }
        for stage in range(2)
        for _ in range(replicas * tensor)
    ]
    stages = {"pipeline_size": 2, "virtual_size": chunks, "num_microbatches": number}
    return record_of({"stages": stages, "ranks": ranks, "data_size": replicas}, "sample", PipelineResult)


def fit(*samples):
    return fit_stages(
        [
            (
                item,
                Modelled(
                    stages_us=[3000.0] * (2 * item.stages.virtual_size),
                    message_us=LINK_US,
                    step=STEP,
                    optimizer_us_per_byte=US_PER_BYTE,
                    sends=SENDS[item.stages.virtual_size],
                ),
            )
            for item in samples
        ]
    )


def figures(cost):
    return (
        cost.message_us if cost.interleaved_message_us is None else cost.interleaved_message_us,
        cost.stage.first_us,
        cost.stage.inner_us,
        cost.stage.last_us,
        cost.step_us,
    )


@pytest.mark.parametrize("number", [4, 8])
def test_messages_passes_and_the_end_of_the_step_are_separated(number):
    cost = fit(sample(2, message=80.0, passes=[10.0, 200.0, 300.0, 400.0], end=150.0, number=number))
    assert figures(cost) == pytest.approx((80.0, 10.0, 250.0, 400.0, 150.0))


def test_a_plain_pipeline_has_no_inner_stage_and_uses_the_last_ones_figure():
    cost = fit(sample(1, message=80.0, passes=[10.0, 400.0], end=150.0))
    assert figures(cost) == pytest.approx((80.0, 10.0, 400.0, 400.0, 150.0))


def test_the_median_of_several_pipelines_counts():
    cost = fit(
        sample(1, message=60.0, passes=[0.0, 300.0], end=100.0),
        sample(2, message=100.0, passes=[20.0, 50.0, 70.0, 500.0], end=200.0),
    )
    assert figures(cost) == pytest.approx((100.0, 10.0, 60.0, 400.0, 150.0))


def test_messages_of_the_two_schedules_are_separated():
    plain, interleaved = [
        sample(1, message=60.0, passes=[0, 0], end=0),
        sample(2, message=100.0, passes=[0] * 4, end=0),
    ]
    cost = fit(plain, interleaved)
    assert (cost.message_us, cost.interleaved_message_us) == pytest.approx((60.0, 100.0))
    assert fit(plain).interleaved_message_us is None
    assert fit(interleaved).message_us == pytest.approx(100.0)


def test_replicas_and_tensor_ranks_of_a_stage_count_once_and_the_reduction_is_not_the_hosts():
    cost = fit(sample(1, message=80.0, passes=[10.0, 400.0], end=150.0, replicas=2, tensor=2))
    assert figures(cost) == pytest.approx((80.0, 10.0, 400.0, 400.0, 150.0))


def test_pipelines_faster_than_their_parts_add_nothing():
    assert figures(fit(sample(1, message=-30.0, passes=[-50.0, -60.0], end=-90.0))) == pytest.approx(
        (0.0, 0.0, 0.0, 0.0, 0.0), abs=1e-3
    )


def test_without_a_pipeline_there_is_no_stage_cost():
    assert fit() is None
    assert PipelineCost().stage.at(0, 2) == 0.0

"""Which pipelines are run, and which blocks their stages hold."""

from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.planner.tuner.stages import PipelineCost, StepCost
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.profiles.calibration_records import PipelineResult, Stages
from mindspeed_autoparallel.profiles.device import Collective, LinkTier, StageOverhead
from mindspeed_autoparallel.profiles.knowledge import KnowledgeBase
from mindspeed_autoparallel.profiles.records import ModelRecord
from mindspeed_autoparallel.runtime.features.auto_tuning.figures import Figures, pipelines_of, stages_us
from mindspeed_autoparallel.runtime.features.auto_tuning.source import _device_cost

PLAIN = MeasuredAt()


def chunks(num_measuring=2, num_layers=8, sends="freed", points=(PLAIN,)):
    request = SimpleNamespace(num_measuring=num_measuring, num_layers=num_layers)
    return [(item.stages.virtual_size, item.num_layers) for item in pipelines_of(request, points, sends)]


def test_a_plain_and_an_interleaved_pipeline_of_as_many_layers():
    assert chunks() == [(1, 4), (2, 4)]


@pytest.mark.parametrize("case", [{"num_layers": 3}, {"sends": "blocking"}])
def test_without_layers_or_overlap_for_chunks_the_plain_one_alone(case):
    assert chunks(**case) == [(1, 2)]


@pytest.mark.parametrize(
    "case",
    [
        {"num_measuring": 1},
        {"num_measuring": 3},
        {"num_layers": 1},
        {"points": ()},
        {"points": (MeasuredAt(tensor_size=2),)},
    ],
)
def test_none_where_devices_or_layers_do_not_make_two_stages(case):
    assert chunks(**case) == []


def test_the_first_of_several_layouts_that_the_devices_hold_is_cut():
    wide, narrow = MeasuredAt(tensor_size=4), MeasuredAt(tensor_size=2)
    request = SimpleNamespace(num_measuring=4, num_layers=4)
    assert {item.at for item in pipelines_of(request, [wide, narrow], "freed")} == {narrow}


TIMES = {"pre": 1.0, "layer": 10.0, "layer:1": 100.0, "post": 1000.0}


def sample(num_chunks):
    return PipelineResult(stages=Stages(pipeline_size=2, virtual_size=num_chunks), num_layers=4)


def test_stages_hold_their_kinds_of_layers_and_the_ends_what_is_beside_them():
    found = stages_us(sample(2), (0, 1, 1, 0, 0, 0), lambda block, direction: TIMES[block])
    assert found == [22.0, 200.0, 200.0, 2020.0]
    assert stages_us(sample(1), (0, 1, 1, 0), lambda block, direction: TIMES[block]) == [222.0, 2220.0]


FIGURES = {
    "message": 5.0,
    "interleaved_message": 9.0,
    "stage_first": 1.0,
    "stage_inner": 2.0,
    "stage_last": 3.0,
    "pipeline_step": 70.0,
}


@pytest.fixture
def of_model(tmp_path):
    """Figures of models that share a knowledge base, by the model's key."""
    base = KnowledgeBase(tmp_path / "knowledge.sqlite")
    return lambda key: Figures(base=base, device="cpu", software="torch", model_key=key)


def priced(figures):
    """The device cost of a run with known ``figures``."""
    tier = LinkTier(default=Collective(latency_us=1.0, bytes_per_s=1e9))
    costs = SimpleNamespace(
        step=StepCost(),
        pipeline=figures.pipeline_cost() or PipelineCost(),
        optimizer_us_per_byte=0.5,
        prices=SimpleNamespace(tiers={"intra": tier, "inter": tier}),
    )
    return _device_cost(costs, {PLAIN: ModelRecord()}, 2**30)


def test_the_measured_overhead_of_pipelines_is_part_of_every_price(of_model):
    of_model("a").keep(**FIGURES)
    device = priced(of_model("a"))
    assert (device.message_us("1f1b"), device.message_us("interleaved"), device.pipeline_step_us) == (5.0, 9.0, 70.0)
    assert device.stage_overhead == StageOverhead(first_us=1.0, inner_us=2.0, last_us=3.0)


def test_kept_results_of_a_pipeline_are_read_back(of_model):
    for interleaved in (None, 9.0):
        cost = PipelineCost(message_us=5.0, interleaved_message_us=interleaved, stage=StageOverhead(last_us=3.0))
        of_model(str(interleaved)).keep_pipeline_cost(cost)
    assert of_model("None").pipeline_cost().interleaved_message_us == 9.0  # of the other model
    assert of_model("9.0").pipeline_cost().stage.last_us == 3.0


def test_without_an_interleaved_one_its_messages_cost_as_others_do(of_model):
    of_model("a").keep(**{name: value for name, value in FIGURES.items() if name != "interleaved_message"})
    assert priced(of_model("a")).message_us("interleaved") == 5.0


def test_where_none_was_run_nothing_is_added(of_model):
    device = priced(of_model("a"))
    assert of_model("a").pipeline_cost() is None
    assert (device.message_us("1f1b"), device.pipeline_step_us, device.stage_overhead) == (0.0, 0.0, StageOverhead())


def test_the_message_overhead_of_one_model_serves_another(of_model):
    assert not of_model("a").pipelines_are_known
    of_model("a").keep(message=5.0)
    assert of_model("b").pipelines_are_known


def test_a_model_that_could_not_be_cut_is_not_tried_again_but_others_are(of_model):
    of_model("a").keep_pipeline_cost(None)
    assert of_model("a").pipelines_are_known
    assert not of_model("b").pipelines_are_known

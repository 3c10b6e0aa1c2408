"""Which pipelines are run, and which blocks their stages hold."""

from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.runtime.tuning.pipelines import pipelines_of, stages_us

PLAIN = MeasuredAt()


def chunks(num_measuring=2, num_layers=8, sends="freed", points=(PLAIN,)):
    request = SimpleNamespace(num_measuring=num_measuring, num_layers=num_layers)
    return [(item.stages.virtual_size, item.num_layers) for item in pipelines_of(request, points, sends)]


def test_a_plain_and_an_interleaved_pipeline_of_as_many_layers():
    assert chunks() == [(1, 4), (2, 4)]


@pytest.mark.parametrize("case", [{"num_layers": 3}, {"sends": "blocking"}])
def test_without_layers_or_overlap_for_chunks_the_plain_one_alone(case):
    assert chunks(**case) == [(1, 2)]


@pytest.mark.parametrize("case", [
    {"num_measuring": 1}, {"num_measuring": 3}, {"num_layers": 1}, {"points": ()},
    {"points": (MeasuredAt(tensor_size=2),)},
])  # fmt: skip
def test_none_where_devices_or_layers_do_not_make_two_stages(case):
    assert chunks(**case) == []


def test_of_several_layouts_the_first_that_the_devices_hold_is_cut():
    wide, narrow = MeasuredAt(tensor_size=4), MeasuredAt(tensor_size=2)
    request = SimpleNamespace(num_measuring=4, num_layers=4)
    assert {item.at for item in pipelines_of(request, [wide, narrow], "freed")} == {narrow}


TIMES = {"pre": 1.0, "layer": 10.0, "layer:1": 100.0, "post": 1000.0}


def sample(num_chunks):
    return {"stages": {"pipeline_size": 2, "virtual_size": num_chunks}, "num_layers": 4}


def test_stages_hold_their_kinds_of_layers_and_the_ends_what_is_beside_them():
    found = stages_us(sample(2), (0, 1, 1, 0, 0, 0), lambda block, direction: TIMES[block])
    assert found == [22.0, 200.0, 200.0, 2020.0]
    assert stages_us(sample(1), (0, 1, 1, 0), lambda block, direction: TIMES[block]) == [222.0, 2220.0]


def test_a_block_that_was_never_measured_makes_the_sample_useless():
    assert stages_us(sample(1), (0, 1, 1, 0), lambda block, direction: None if block == "pre" else 1.0) is None

"""The replay of a small sharded step, by hand-computed bytes."""

from dataclasses import replace

import pytest

from mindspeed_autoparallel.schedule.sharded import StreamModule, StreamTraining, Unit, replay
from mindspeed_autoparallel.spec.sharded import RECOMPUTE

LAYER = StreamModule(
    name="layer", parent=0, policy=RECOMPUTE, input_bytes=10, again_bytes=50, tail_forward_ns=1, tail_saves=False
)
UNSAVED = replace(LAYER, unsaved_bytes=(70, 75))
INNER = StreamModule(name="layer.inner", parent=1, again_bytes=5, unsaved_bytes=(90, 0), around_bytes=30)


@pytest.mark.parametrize(
    ("inside", "peak_bytes", "point"),
    [
        ((LAYER,), 10 + 50, "recomputation of layer"),
        ((UNSAVED,), 10 + 75, "end of forward of layer"),
        ((UNSAVED, INNER), 10 + 30 + 90, "forward of layer.inner"),
        ((replace(LAYER, around_bytes=60), replace(INNER, unsaved_bytes=None)), 10 + 60 + 30, "forward of layer.inner"),
    ],
)
def test_a_first_forward_that_saves_nothing_may_be_the_peak(
    inside: tuple[StreamModule, ...], peak_bytes: int, point: str
) -> None:
    root = StreamModule(name="", units=(0,))
    replayed = replay(StreamTraining(modules=(root, *inside), units=(Unit(name="root", empty=True),)))
    assert (replayed.peak_bytes, replayed.peak_point) == (peak_bytes, point)

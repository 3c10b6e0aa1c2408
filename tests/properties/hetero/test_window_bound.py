"""Mode window: what encoders add to any pipeline at least, against the replayed step."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from mindspeed_autoparallel.planner.hetero.device_work import PipelineWork, own_work_at_least_us
from mindspeed_autoparallel.planner.hetero.windowed import encoders_at_least_us
from mindspeed_autoparallel.schedule import SENDS
from mindspeed_autoparallel.schedule.window import BackboneTimes, MacroBatchTimes, ticks_of, window_step_us

TIMES = st.floats(0.0, 50.0)


@st.composite
def steps(draw: st.DrawFn) -> tuple[BackboneTimes, list[list[MacroBatchTimes]]]:
    """Stages of any length, virtual ones too, any kind of sends, one or two encoders of any scale; transfers that cost
    something or nothing."""
    stages, microbatches = draw(st.integers(1, 5)), draw(st.integers(1, 9))
    chunks = draw(st.integers(1, 3)) if stages > 1 else 1
    if chunks > 1:
        microbatches = stages * draw(st.integers(1, 3))
    virtual = stages * chunks

    def times(count: int) -> list[float]:
        return draw(st.lists(TIMES, min_size=count, max_size=count))

    backbone = BackboneTimes(
        forward_us=times(virtual),
        backward_us=times(virtual),
        link_us=times(virtual - 1),
        num_microbatches=microbatches,
        num_chunks=chunks,
        sends=draw(st.sampled_from(SENDS[1:])) if chunks > 1 else "blocking",
    )
    encoders = []
    for _ in range(draw(st.integers(1, 2))):
        scale = draw(st.integers(1, microbatches))
        moved = draw(st.sampled_from([(0.0, 3.0, 4.0), (2.0, 0.0, 0.0), (0.0, 0.0, 0.0), (1.0, 40.0, 30.0)]))
        encoders.append(
            [
                MacroBatchTimes(
                    first=first,
                    last=min(first + scale, microbatches) - 1,
                    inputs_us=moved[0],
                    forward_us=times(stages),
                    outputs_us=moved[1],
                    gradients_us=moved[2],
                    backward_us=times(stages),
                )
                for first in range(0, microbatches, scale)
            ]
        )
    return backbone, encoders


def at_least_us(backbone: BackboneTimes, encoders: list[list[MacroBatchTimes]]) -> float:
    link_us = max(backbone.link_us, default=0.0)
    return encoders_at_least_us(ticks_of(*backbone.sizes), backbone.num_stages, link_us, encoders)


@settings(max_examples=300, deadline=None)
@given(steps())
def test_encoders_add_at_least_that(step: tuple[BackboneTimes, list[list[MacroBatchTimes]]]) -> None:
    backbone, encoders = step
    least_us = window_step_us(backbone, []) + at_least_us(backbone, encoders)
    assert window_step_us(backbone, encoders) >= least_us - 1e-6


@settings(max_examples=300, deadline=None)
@given(steps(), st.floats(0.0, 50.0), st.data())
def test_a_device_works_at_least_that(
    step: tuple[BackboneTimes, list[list[MacroBatchTimes]]], layer_us: float, data: st.DataObject
) -> None:
    """Layers of one time are drawn onto the stages, on top of what is there: the bound is of their total only."""
    backbone, encoders = step
    virtual = len(backbone.forward_us)
    held = data.draw(st.lists(st.integers(0, 4), min_size=virtual, max_size=virtual))
    backbone = replace(
        backbone,
        forward_us=[own + 0.4 * layer_us * n for own, n in zip(backbone.forward_us, held, strict=True)],
        backward_us=[own + 0.6 * layer_us * n for own, n in zip(backbone.backward_us, held, strict=True)],
    )
    work = PipelineWork(
        num_stages=backbone.num_stages,
        num_chunks=backbone.num_chunks,
        num_microbatches=backbone.num_microbatches,
        work_us=sum(backbone.forward_us) + sum(backbone.backward_us),
        layers=[(sum(held), layer_us)],
    )
    least_us = own_work_at_least_us(work, ticks_of(*backbone.sizes), encoders)
    assert window_step_us(backbone, encoders) >= least_us * (1 - 1e-9) - 1e-6


def test_a_device_that_encodes_alone_holds_no_layers() -> None:
    """Two stages, four microbatches, two layers of 10 us: all encoding on stage 0 leaves both layers to stage 1."""
    batches = [
        MacroBatchTimes(
            first=m,
            last=m,
            inputs_us=0.0,
            forward_us=[30.0, 0.0],
            outputs_us=0.0,
            gradients_us=0.0,
            backward_us=[30.0, 0.0],
        )
        for m in range(4)
    ]
    work = PipelineWork(num_stages=2, num_chunks=1, num_microbatches=4, work_us=20.0, layers=[(2, 10.0)])
    replayed = [
        window_step_us(
            BackboneTimes(
                forward_us=[4.0 * first, 4.0 * (2 - first)],
                backward_us=[6.0 * first, 6.0 * (2 - first)],
                link_us=[0.0],
                num_microbatches=4,
            ),
            [batches],
        )
        for first in range(3)
    ]
    assert 4 * 60 - 1e-6 <= own_work_at_least_us(work, ticks_of(2, 4), [batches]) <= min(replayed)


def test_layers_that_take_almost_nothing_bound_nothing() -> None:
    work = PipelineWork(num_stages=2, num_chunks=1, num_microbatches=4, work_us=1.0, layers=[(8, 1e-308)])
    assert 4 * 0.5 - 1e-6 <= own_work_at_least_us(work, ticks_of(2, 4), []) <= 4


def test_on_one_stage_the_bound_is_the_step() -> None:
    backbone = BackboneTimes(forward_us=[5.0], backward_us=[9.0], link_us=[], num_microbatches=3)
    batches = [
        MacroBatchTimes(
            first=m, last=m, inputs_us=0.0, forward_us=[2.0], outputs_us=0.0, gradients_us=0.0, backward_us=[3.0]
        )
        for m in range(3)
    ]
    assert window_step_us(backbone, [batches]) == 3 * (5 + 9) + at_least_us(backbone, [batches]) == 57

"""Megatron's schedules on the emulated device against our programs and our simulator, to the nanosecond."""

import random

import pytest
from emulated_device.cases import Case
from emulated_device.launching import run_on_emulated_device

from mindspeed_autoparallel.schedule import StepTimes, make_program, simulate

pytestmark = [pytest.mark.emulated, pytest.mark.megatron]

SHAPES = [(4, 8), (4, 2), (4, 1), (4, 13), (2, 5), (3, 7), (1, 4)]
"""(pipeline size, microbatches); fewer microbatches than stages too."""


def drawn_case(pipeline_size, num_microbatches, seed, virtual_size=1, **changes):
    """Times that differ by stage and microbatch, links that differ by boundary."""
    drawn = random.Random(seed)
    num_virtual = pipeline_size * virtual_size
    return Case(
        pipeline_size=pipeline_size, virtual_size=virtual_size, num_microbatches=num_microbatches,
        forward_ns=[[drawn.randint(10_000, 60_000) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        backward_ns=[[drawn.randint(20_000, 110_000) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        link_ns=[drawn.randint(100, 9_000) for _ in range(num_virtual - 1)], **changes,
    )  # fmt: skip


def times_of(case):
    return StepTimes(forward=case.forward_ns, backward=case.backward_ns, link=case.link_ns)


def test_1f1b_has_megatrons_order_and_step_time(megatron_release):
    cases = [drawn_case(size, count, seed) for size, count in SHAPES for seed in (1, 2)]
    for case, outcome in zip(cases, run_on_emulated_device(cases, megatron=megatron_release), strict=True):
        program = make_program("1f1b", case.pipeline_size, case.num_microbatches)
        assert outcome.orders == [[tuple(action) for action in actions] for actions in program]
        assert simulate(program, times_of(case), rendezvous=True).step_time == outcome.step_ns
        assert outcome.busy_ns == [sum(f) + sum(b) for f, b in zip(case.forward_ns, case.backward_ns, strict=True)]

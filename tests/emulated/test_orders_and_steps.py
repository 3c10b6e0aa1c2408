"""Megatron's schedules on the emulated device against our programs and our simulator, to the nanosecond."""

import functools
import importlib.util
import random
from dataclasses import replace
from pathlib import Path

import pytest
from emulated_device.cases import Case
from emulated_device.launching import run_on_emulated_device

from mindspeed_autoparallel.schedule import StepTimes, in_flight, make_program, simulate

pytestmark = [pytest.mark.emulated, pytest.mark.megatron]


def drawn_case(pipeline_size, virtual_size, num_microbatches, **settings):
    """Times that differ by stage and microbatch, links that differ by boundary; every block holds one byte."""
    drawn = random.Random(f"{pipeline_size} {virtual_size} {num_microbatches}")
    num_virtual = pipeline_size * virtual_size
    return Case(
        pipeline_size=pipeline_size,
        virtual_size=virtual_size,
        num_microbatches=num_microbatches,
        forward_ns=[[drawn.randint(10_000, 60_000) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        backward_ns=[[drawn.randint(20_000, 110_000) for _ in range(num_microbatches)] for _ in range(num_virtual)],
        link_ns=[drawn.randint(100, 9_000) for _ in range(num_virtual - 1)],
        blocks=[[(1, 0, 0)]] * num_virtual,
        **settings,
    )


CASES = {
    **{
        f"PP{size} M{count}": drawn_case(size, 1, count)
        for size, count in ((4, 8), (4, 2), (4, 1), (4, 13), (2, 5), (1, 4))
    },
    **{
        f"PP{size} VPP{chunks} M{count} {name}": drawn_case(size, chunks, count, **settings)
        for size, chunks, count in ((4, 2, 8), (4, 2, 4), (2, 3, 6))
        for name, settings in {
            "overlap": {},
            "overlap, outputs kept": {"free_outputs": False},
            "overlap with warm-up flush": {"warmup_flush": True},
            "overlap with warm-up flush, outputs kept": {"warmup_flush": True, "free_outputs": False},
            "blocking": {"overlap": False},
        }.items()
        if size > 2 or name != "blocking"  # Megatron refuses it: two ranks would mix up the two directions
    },
    "PP4 VPP3 M16 overlap": drawn_case(4, 3, 16),
    "PP4 VPP2 M12 groups of 6": drawn_case(4, 2, 12, microbatch_group_size=6),
    "PP2 VPP2 M7 groups of 5": drawn_case(2, 2, 7, microbatch_group_size=5),
}


def paired_case(pipeline_size, virtual_size, num_microbatches, **settings):
    """Combined 1F1B; what pairs save differs by both their stages."""
    drawn = random.Random(f"pairs {pipeline_size} {virtual_size} {num_microbatches}")
    stages = range(pipeline_size * virtual_size)
    savings = [[drawn.randint(0, 9_000) for _ in stages] for _ in stages]
    plain = drawn_case(pipeline_size, virtual_size, num_microbatches, **settings)
    return replace(plain, paired=True, saving_ns=savings)


PAIRED_CASES = {
    "PP1 M4 pairs": paired_case(1, 1, 4),
    "PP4 VPP2 M4 pairs": paired_case(4, 2, 4),
    "PP4 VPP2 M8 pairs, outputs kept": paired_case(4, 2, 8, free_outputs=False),
    "PP4 VPP2 M8 pairs with warm-up flush": paired_case(4, 2, 8, warmup_flush=True),
    "PP4 VPP2 M8 pairs, blocking": paired_case(4, 2, 8, overlap=False),
    "PP2 VPP3 M6 pairs": paired_case(2, 3, 6),
    "PP2 VPP2 M2 pairs": paired_case(2, 2, 2),
    "PP2 VPP2 M7 pairs in groups of 5": paired_case(2, 2, 7, microbatch_group_size=5),
}
# Three ranks do not divide the others' launch: only where they tell something new (a warm-up that leaves one forward).
ODD_CASES = {
    "PP3 M7": drawn_case(3, 1, 7),
    "PP3 VPP2 M3": drawn_case(3, 2, 3),
    "PP3 VPP2 M6": drawn_case(3, 2, 6),
    "PP3 VPP3 M3 blocking": drawn_case(3, 3, 3, overlap=False),
    "PP3 VPP2 M3 flush": drawn_case(3, 2, 3, warmup_flush=True),
}


def cases_of(release, odd):
    """The cases that a release supports: combined 1F1B exists from 0.14 on."""
    place = Path("megatron/core/pipeline_parallel/combined_1f1b.py")
    folders = release or [Path(importlib.util.find_spec("megatron.core").origin).parents[2]]
    has_pairs = any((folder / place).exists() for folder in folders)
    return ODD_CASES if odd else {**CASES, **(PAIRED_CASES if has_pairs else {})}


@functools.cache
def outcomes(release, odd):
    """One launch for all cases of this file."""
    cases = cases_of(release, odd)
    return dict(zip(cases, run_on_emulated_device(list(cases.values()), megatron=release), strict=True))


def program_of(case):
    schedule = "interleaved" if case.virtual_size > 1 else "1f1b"
    size, count, group = case.pipeline_size, case.num_microbatches, case.microbatch_group_size or 0
    return make_program(schedule, size, count, case.virtual_size, group, case.paired)


def sends_of(case, release):
    """How this release treats messages under the case's settings: see ``schedule.SENDS``."""
    if case.virtual_size == 1 or not case.overlap:
        return "blocking"
    waits_to_free = case.free_outputs and tuple(map(int, release.split(".")[:2])) >= (0, 19)
    if case.warmup_flush:
        return "flushed-freed" if waits_to_free else "flushed"
    return "freed" if waits_to_free else "overlapped"


def times_of(case):
    savings = {(v, w): saving for v, row in enumerate(case.saving_ns) for w, saving in enumerate(row)}
    return StepTimes(forward=case.forward_ns, backward=case.backward_ns, link=case.link_ns, paired_saving=savings)


def check(cases, found):
    for name, case in cases.items():
        outcome, program = found[name], program_of(case)
        assert outcome.orders == [[action[:3] for action in actions] for actions in program], name
        times = times_of(case)
        predicted = simulate(program, times, sends=sends_of(case, outcome.release), with_timeline=True)
        assert predicted.step_time == outcome.pipeline_ns, name
        assert list(predicted.busy) == outcome.busy_ns, name
        assert list(in_flight(program)) == outcome.peak_bytes, name
        assert not any(outcome.held_bytes), name


def test_order_step_time_and_microbatches_in_flight_are_megatrons(megatron_release):
    release = tuple(megatron_release)
    check(cases_of(release, False), outcomes(release, False))


def test_three_stages_too():
    pytest.importorskip("megatron.core")
    check(ODD_CASES, outcomes((), True))


def test_interleaved_sends_that_never_wait_would_be_predicted_too_fast():
    """The device tells the models apart: the messages matter."""
    pytest.importorskip("megatron.core")
    errors = []
    for name, outcome in outcomes((), False).items():
        case = cases_of((), False)[name]
        if case.virtual_size > 1 and not case.paired:
            times = times_of(case)
            errors.append(1 - simulate(program_of(case), times, sends="eager").step_time / outcome.pipeline_ns)
    assert max(errors) > 0.05
    assert min(errors) >= 0

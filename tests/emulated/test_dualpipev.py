"""DualPipeV of MindSpeed's own source on the emulated device, against our program and simulator, to the nanosecond."""

import os
import random
from pathlib import Path

import pytest
from emulated_device.cases import Case
from emulated_device.launching import run_on_emulated_device
from megatron_releases import megatron_path

from mindspeed_autoparallel.schedule import StepTimes, in_flight, simulate
from mindspeed_autoparallel.schedule.dualpipev import DUALPIPEV, chain_stage, dualpipev_program

pytestmark = [pytest.mark.emulated, pytest.mark.megatron]
SOURCES = os.environ.get("MINDSPEED_SOURCES", "")
SIZES = ((4, 7), (4, 8), (4, 13), (2, 3), (2, 4), (2, 9))


def dualpipev_case(num_stages, num_microbatches, **settings):
    drawn = random.Random(f"dualpipev {num_stages} {num_microbatches}")
    stages = range(2 * num_stages)
    return Case(
        pipeline_size=num_stages,
        virtual_size=2,
        num_microbatches=num_microbatches,
        dualpipev=SOURCES,
        forward_ns=[[drawn.randint(10_000, 60_000) for _ in range(num_microbatches)] for _ in stages],
        backward_ns=[[drawn.randint(20_000, 110_000) for _ in range(num_microbatches)] for _ in stages],
        link_ns=[drawn.randint(100, 9_000) for _ in stages[1:]],
        blocks=[[(1, 0, 0)] for _ in stages],
        **settings,
    )


def test_order_step_time_and_microbatches_in_flight_are_mindspeeds():
    release = megatron_path("0.12")
    if not SOURCES or not (Path(SOURCES) / "mindspeed").is_dir():
        pytest.skip("MINDSPEED_SOURCES names no checkout of MindSpeed (tests/hosts/README.md)")
    if release is None:
        pytest.skip("megatron-core 0.12, which MindSpeed is written for, is not here")
    cases = [dualpipev_case(*sizes) for sizes in SIZES] + [dualpipev_case(4, 9, free_outputs=False)]
    for case, outcome in zip(cases, run_on_emulated_device(cases, megatron=release), strict=True):
        program, size = dualpipev_program(case.pipeline_size, case.num_microbatches), case.pipeline_size
        assert outcome.orders == [[action[:3] for action in actions] for actions in program]
        stages = [chain_stage(rank, chunk, size) for chunk in range(2) for rank in range(size)]
        times = StepTimes(
            forward=[case.forward_ns[stage] for stage in stages],
            backward=[case.backward_ns[stage] for stage in stages],
            link=case.link_ns,
        )
        found = simulate(program, times, sends=DUALPIPEV, with_timeline=True)
        assert found.step_time == outcome.pipeline_ns
        assert list(found.busy) == outcome.busy_ns
        assert list(in_flight(program)) == outcome.peak_bytes

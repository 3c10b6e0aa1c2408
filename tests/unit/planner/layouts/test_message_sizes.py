"""Messages of an encoder and of a decoder differ in size: which boundary carries which depends on the split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.planner.split import time_of
from mindspeed_autoparallel.profiles import ModuleCost, Profile
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB

CLUSTER, LAYOUT, BATCH = Cluster(num_nodes=1, devices_per_node=3), Layout(pipeline_size=3), 12


def profile_of(encoder_mib: int, decoder_mib: int) -> Profile:
    """Return the small profile with these outputs of the modules' layers; memory is no matter."""
    profile = small_profile()
    (measurement, *_) = profile.measurements
    modules = {
        "image_encoder": ModuleCost(layer=block(700, recomputable=True, output_bytes=encoder_mib * MIB)),
        "text_decoder": ModuleCost(layer=block(900, recomputable=True, output_bytes=decoder_mib * MIB)),
    }
    return replace(profile, measurements=(replace(measurement, modules=modules),))


@pytest.mark.parametrize(("encoder_mib", "decoder_mib"), [(1, 40), (40, 1), (8, 9)])
def test_the_best_split_is_proved_and_equals_enumeration(encoder_mib: int, decoder_mib: int) -> None:
    profile = profile_of(encoder_mib, decoder_mib)
    plan = search(profile, CLUSTER, BATCH, SearchOptions(layouts=[LAYOUT], with_relaxations=False))
    steps = []
    for first in range(1, 6):
        for second in range(first + 1, 6):
            ends = [0, first, second, 6]
            done = [(min(2, end), max(0, end - 2)) for end in ends]
            layers = {
                name: tuple(done[v + 1][k] - done[v][k] for v in range(3))
                for k, name in enumerate(("image_encoder", "text_decoder"))
            }
            try:
                found = evaluate(profile, CLUSTER, LAYOUT, ModulePlacement(layers=layers, recompute={}), BATCH)
            except ConfigError:
                continue
            steps.append(found.step.total_us)
    assert plan.step.total_us == pytest.approx(min(steps))
    assert plan.search.status == "optimal"


def test_the_start_of_the_last_module_determines_the_time_of_every_message() -> None:
    """The problem's step is the exact one, at any start; without the start it may be too short."""
    profile = profile_of(1, 40)
    layout = Layout(pipeline_size=2, virtual_size=2, schedule="interleaved")
    (measurement, *_) = profile.measurements
    cluster, limits = Cluster(num_nodes=1, devices_per_node=2), (2**50, 2**50)
    candidate = Candidate(
        profile=profile, cluster=cluster, layout=layout, measurement=measurement, num_microbatches=BATCH
    )
    for layers, begins in (((2, 0, 0, 0), 1), ((1, 1, 0, 0), 2)):
        text = tuple(0 if v < begins else 1 for v in range(3))
        rows = (layers, (*text, 4 - sum(text)))
        placement = ModulePlacement(
            layers={"image_encoder": rows[0], "text_decoder": rows[1]},
            recompute={name: {"full": (0, 0, 0, 0)} for name in ("image_encoder", "text_decoder")},
        )
        exact = evaluate(profile, cluster, layout, placement, BATCH, with_timeline=False).step.pipeline_us
        told = tuple((row, (0, 0, 0, 0)) for row in rows)
        problem = build_problem(candidate, limits, safe=False, last_module_from=begins)
        unknown = build_problem(candidate, limits, safe=False)
        assert time_of(problem, told) == pytest.approx(exact * 1000, rel=1e-6)
        assert time_of(unknown, told) < 0.999 * exact * 1000

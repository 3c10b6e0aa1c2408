"""Messages of an encoder and of a decoder differ in size: which boundary carries which depends on the split."""

from __future__ import annotations

from dataclasses import replace

import pytest
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
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

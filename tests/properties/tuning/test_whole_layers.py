"""Whole layers computed again, singly or in groups: what trying every way finds, and nothing is evaluated twice."""

from collections import Counter
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from language_profile import language_profile

from mindspeed_autoparallel.planner.tuner import placements
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import RecomputePolicy

_CLUSTER, _BATCH = Cluster(num_nodes=1, devices_per_node=4), 16


@settings(max_examples=40, deadline=None)
@given(
    num_layers=st.integers(2, 16).map(lambda half: 2 * half),
    capacity_mib=st.integers(2_000, 30_000),
    virtual=st.sampled_from([1, 2]),
    place=st.integers(0),
    groups=st.booleans(),
)
def test_the_fastest_that_fits_is_found_with_every_placement_evaluated_once(
    num_layers: int, capacity_mib: int, virtual: int, place: int, groups: bool
) -> None:
    profile = language_profile(num_layers=num_layers, capacity_mib=capacity_mib, tensor=(1,), batches=(1, 2))
    dimensions = Dimensions(virtual_sizes=(virtual,), recompute=("none", "full"), layer_groups=groups)
    space = enumerate_space([ProfileVariant(name="", settings={}, profile=profile)], _CLUSTER, _BATCH, dimensions)
    configuration = space.configurations[place % len(space.configurations)]
    (layers,) = placements.even_or_balanced_splits(configuration, dimensions)
    longest = max(layers)
    ways = [("none", 0), *(("full", number) for number in range(1, longest + 1))]
    ways += [(str(RecomputePolicy.full(size)), longest) for size in range(2, longest + 1) if groups]
    tried = [placements.evaluate_placement(configuration, layers, kind, number, dimensions) for kind, number in ways]
    fitting = [found.step_us for found in tried if found.evaluation.fits]

    with mock.patch.object(placements, "evaluate_placement", wraps=placements.evaluate_placement) as evaluated:
        best, missing = placements.solve(configuration, dimensions)

    assert (best is None) == (not fitting)
    if best is not None:
        assert best.step_us == pytest.approx(min(fitting))
    else:
        assert missing is not None
        assert missing[0] >= min(found.peak_bytes for found in tried)
    asked = Counter(call.args[1:4] for call in evaluated.call_args_list)
    assert set(asked.values()) <= {1}, asked

"""Where nothing fits: states rule layouts out without rows, and the answer names a cluster that is enough."""

from __future__ import annotations

import re

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.bounds import least_static_bytes
from mindspeed_autoparallel.planner.layouts.layout_solver import simple_splits
from mindspeed_autoparallel.planner.layouts.nothing_fits import too_full
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.units import MIB


def test_no_placement_takes_less_than_its_states() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=2, devices_per_node=4, memory_limit_bytes=2**40)
    candidates, _ = enumerate_layouts(profile, cluster, 16, SpaceOptions())
    for candidate in candidates:
        least = least_static_bytes(profile, candidate)
        for split in simple_splits(profile, cluster, candidate, 16):
            everything = ModulePlacement(
                layers=dict(split.placement.layers),
                recompute={n: {"full": row} for n, row in split.placement.layers.items()},
            )
            found = evaluate(profile, cluster, candidate.layout, everything, 16)
            assert max(rank.peak_bytes for rank in found.memory) >= least > 0


def test_layouts_that_their_states_rule_out_are_named_with_their_bytes() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=1, devices_per_node=4, memory_limit_bytes=60 * MIB)
    candidates, _ = enumerate_layouts(profile, cluster, 16, SpaceOptions())
    left, full, verdicts = too_full(profile, cluster, candidates)
    assert len(left) + len(full) == len(candidates) and len(full) == len(verdicts)
    assert full and all("whatever the split" in verdict.reason for verdict in verdicts)


def test_the_cluster_that_is_named_has_a_plan() -> None:
    profile = small_profile()
    for limit in (240, 200, 160, 120, 80):
        cluster = Cluster(num_nodes=1, devices_per_node=4, memory_limit_bytes=limit * MIB)
        try:
            search(profile, cluster, 16)
        except InfeasiblePlan as error:
            found = re.search(r"The memory of (\d+) nodes", str(error))
            if found is not None:
                larger = Cluster(num_nodes=int(found[1]), devices_per_node=4, memory_limit_bytes=limit * MIB)
                assert search(profile, larger, 16).num_microbatches >= 1
                return
    pytest.fail("no limit was tight enough on one node and wide enough on more")

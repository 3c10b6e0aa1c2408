"""Where nothing fits: states rule layouts out without rows, and the answer names a cluster that is enough."""

from __future__ import annotations

import re
from dataclasses import replace

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
from mindspeed_autoparallel.planner.runnable import runnable
from mindspeed_autoparallel.profiles import BlockCost, Profile
from mindspeed_autoparallel.spec import Cluster, Plan
from mindspeed_autoparallel.units import MIB


def test_no_placement_takes_less_than_its_states() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=2, devices_per_node=4, memory_limit_bytes=2**40)
    candidates, _ = enumerate_layouts(profile, cluster, 16, SpaceOptions())
    for candidate in candidates:
        least = least_static_bytes(candidate)
        for split in simple_splits(candidate).values():
            everything = ModulePlacement(
                layers=dict(split.placement.layers),
                recompute={n: {"full": row} for n, row in split.placement.layers.items()},
            )
            found = evaluate(profile, cluster, candidate.layout, everything, 16)
            assert max(rank.peak_bytes for rank in found.memory) >= least > 0


def test_layouts_that_their_states_rule_out_are_named_with_their_bytes() -> None:
    profile, cluster = small_profile(), Cluster(num_nodes=1, devices_per_node=4, memory_limit_bytes=60 * MIB)
    candidates, _ = enumerate_layouts(profile, cluster, 16, SpaceOptions())
    left, full, verdicts = too_full(candidates)
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


def _with_parts(_: str, layer: BlockCost) -> BlockCost:
    """Offer a recompute of parts that needs less memory than that of whole layers."""
    if "full" not in layer.recompute:
        return layer
    parts = replace(layer.recompute["full"], backward_peak_bytes=MIB)
    return replace(layer, recompute={**layer.recompute, "selective": parts})


def test_the_limit_that_is_named_is_enough_for_what_the_host_can_recompute() -> None:
    original = small_profile()
    measurements = tuple(
        replace(one, modules={name: cost.with_layers(_with_parts) for name, cost in one.modules.items()})
        for one in original.measurements
    )
    profile = replace(original, measurements=measurements)

    def no_parts(plan: Plan) -> bool:
        return not any("selective" in kinds for stage in plan.stages for kinds in stage.recompute.values())

    def within(mib: int) -> Plan:
        cluster = Cluster(num_nodes=1, devices_per_node=2, memory_limit_bytes=mib * MIB)

        def of(one: Profile) -> Plan:
            return search(one, cluster, 4)

        return runnable(of, profile, no_parts)

    with pytest.raises(InfeasiblePlan, match="recomputed whole or not at all") as caught:
        within(10)
    limit = re.search(r"A memory limit of (\d+) MiB per device is enough", str(caught.value))
    assert limit is not None
    assert no_parts(within(int(limit[1])))
    with pytest.raises(InfeasiblePlan):
        within(int(limit[1]) - 1)

"""Buffers that the host keeps for all blocks together count on every rank, for what is solved and what is reported."""

from dataclasses import replace

from small_profile import small_profile

from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.spec import Cluster, Layout

MIB = 1024**2
CLUSTER = Cluster(num_nodes=1, devices_per_node=2)
LAYOUT = Layout(pipeline_size=2)


def plan(workspace_mib, limit_mib):
    profile = small_profile()
    points = tuple(replace(point, workspace_bytes=workspace_mib * MIB) for point in profile.measurements)
    profile = replace(profile, measurements=points)
    return search(profile, replace(CLUSTER, memory_limit_bytes=limit_mib * MIB), 8, SearchOptions(layouts=[LAYOUT]))


def num_recomputed(found):
    return sum(sum(kinds.values()) for stage in found.stages for kinds in stage.recompute.values())


def test_every_rank_holds_it():
    without, with_it = plan(0, 1000), plan(100, 1000)
    assert [rank.peak_bytes + 100 * MIB for rank in without.memory] == [rank.peak_bytes for rank in with_it.memory]


def test_the_workspace_leaves_less_room_to_the_layers():
    without = plan(0, 1000)
    limit_mib = max(rank.peak_bytes for rank in without.memory) // MIB + 1
    assert num_recomputed(plan(0, limit_mib)) == 0
    tight = plan(50, limit_mib)
    assert num_recomputed(tight) > 0
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in tight.memory)

"""Short rows keep to their time."""

from __future__ import annotations

from math import inf
from types import SimpleNamespace

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.planner.layouts import short_rows
from mindspeed_autoparallel.planner.layouts.layout_solver import limits_of
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.problem_building import build_problem
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB


def test_ways_to_recompute_end_with_the_time_where_none_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = small_profile()
    cluster = Cluster(num_nodes=2, devices_per_node=1, memory_limit_bytes=MIB)
    (candidate,), _ = enumerate_layouts(profile, cluster, 4, SpaceOptions(), [Layout(pipeline_size=2)])
    problem = build_problem(profile, cluster, candidate, limits_of(profile, cluster, 2), safe=False)
    clock = [0.0]

    def fits(*_: object) -> bool:
        clock[0] += 1.0
        return False

    monkeypatch.setattr(short_rows, "fits_rank", fits)
    monkeypatch.setattr(short_rows, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    found = short_rows.search_short_row(profile, cluster, candidate, 4, problem, deadline=inf)
    assert found is not None and found.complete and found.best is None
    every, clock[0] = clock[0], 0.0
    found = short_rows.search_short_row(profile, cluster, candidate, 4, problem, deadline=2.5)
    assert found is not None and not found.complete
    assert clock[0] == 3.0 < every

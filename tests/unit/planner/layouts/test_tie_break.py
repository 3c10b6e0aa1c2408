"""The same plan and the same recomputation on every run: ties are broken, time and hashing decide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.layout_solver import with_least_recompute
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout

INTERLEAVED = Layout(pipeline_size=4, virtual_size=2, schedule="interleaved")
NUM_LAYERS = 12


def _language_model(capacity_mib: int) -> Profile:
    profile = small_profile(capacity_mib=capacity_mib)
    module = replace(profile.model.modules[1], predecessors=(), num_layers=NUM_LAYERS)
    return replace(
        profile,
        model=replace(profile.model, modules=(module,)),
        measurements=tuple(
            replace(point, modules={module.name: point.modules[module.name]}) for point in profile.measurements
        ),
    )


def _plan(path: Path, hash_seed: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "mindspeed_autoparallel.cli.main", "plan", "--profile", str(path), "--json"]
    command += ["--nnodes", "1", "--nproc-per-node", "4", "--global-batch-size", "8", "--num-workers", "1"]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=True)
    value: dict[str, Any] = json.loads(done.stdout)
    del value["search"]["seconds"]
    return value


def test_a_tight_interleaved_plan_is_the_same_on_every_run(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    _language_model(420).write(path)
    first, second = (_plan(path, seed) for seed in ("1", "2"))
    assert first == second
    # Tight: something has to be recomputed, so there was a choice.
    assert any(stage["recompute"] for stage in first["stages"])


def test_a_tight_interleaved_layout_is_solved_alike_again() -> None:
    profile, cluster = _language_model(560), Cluster(num_nodes=1, devices_per_node=4)
    plans = [
        search(profile, cluster, 8, SearchOptions(layouts=[INTERLEAVED], with_relaxations=False, num_workers=1))
        for _ in range(2)
    ]
    assert plans[0].stages == plans[1].stages
    assert any(stage.recompute for stage in plans[0].stages)


@pytest.mark.parametrize("layout", [INTERLEAVED, Layout(pipeline_size=4), Layout(pipeline_size=2)])
def test_no_layer_is_recomputed_that_its_rank_could_keep(layout: Layout) -> None:
    profile = _language_model(600)
    cluster = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size)
    num = layout.num_virtual_stages
    row = tuple(NUM_LAYERS // num + (v < NUM_LAYERS % num) for v in range(num))
    everything = ModulePlacement(layers={"text_decoder": row}, recompute={"text_decoder": {"full": row}})
    (candidate,), _ = enumerate_layouts(profile, cluster, 8, SpaceOptions(), [layout])
    found = with_least_recompute(candidate, everything)
    least = found.placement
    assert least.layers == everything.layers
    assert found.fits
    assert found.step.total_us < evaluate(profile, cluster, layout, everything, 8).step.total_us
    recomputed = least.recomputed("text_decoder")
    for v, count in enumerate(recomputed):
        if count:
            fewer = tuple(number - (other == v) for other, number in enumerate(recomputed))
            placement = ModulePlacement(layers=least.layers, recompute={"text_decoder": {"full": fewer}})
            assert not evaluate(profile, cluster, layout, placement, 8).fits


def test_a_time_limit_that_is_not_hit_changes_nothing() -> None:
    profile, cluster = _language_model(500), Cluster(num_nodes=1, devices_per_node=4)
    plans = [
        search(profile, cluster, 8, SearchOptions(time_limit_s=limit, with_relaxations=False))
        for limit in (300.0, 3000.0)
    ]
    assert plans[0].stages == plans[1].stages
    assert plans[0].search.verdicts == plans[1].search.verdicts


def test_a_time_limit_that_is_hit_leaves_a_plan_and_an_honest_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, cluster = small_profile(capacity_mib=250), Cluster(num_nodes=1, devices_per_node=4)
    whole = search(profile, cluster, 8)
    clock = iter(range(10**6))
    # Every look at the clock is a second later: the limit comes after the simple splits.
    monkeypatch.setattr("mindspeed_autoparallel.planner.layouts.search.time.monotonic", lambda: float(next(clock)))
    stopped = search(profile, cluster, 8, SearchOptions(time_limit_s=2.5, with_relaxations=False, num_workers=1))
    monkeypatch.undo()
    assert stopped.search.status == "feasible"
    assert stopped.search.lower_bound_us <= whole.step.total_us <= stopped.step.total_us
    assert 0 < stopped.search.gap_fraction < 1
    assert any("time" in verdict.reason for verdict in stopped.search.verdicts)
    assert all(rank.peak_bytes <= rank.limit_bytes for rank in stopped.memory)

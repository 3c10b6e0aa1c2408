"""Alternatives are plans in short: whatever search they come from, their record is enough to price them again."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from how_many import how_many
from hypothesis import given, settings
from hypothesis import strategies as st
from random_profiles import random_job
from small_profile import small_profile

from mindspeed_autoparallel.errors import AutoParallelError, InfeasiblePlan
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.hetero.encoders import SUMMED_MODES
from mindspeed_autoparallel.planner.hetero.search import search_hetero
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.spec import Cluster, Plan
from mindspeed_autoparallel.spec.plan_records import Alternative


def peak_bytes(plan: Plan) -> int:
    return max(rank.peak_bytes for rank in plan.memory)


def placement_of(other: Alternative) -> ModulePlacement:
    return ModulePlacement(
        layers=other.layers, recompute=other.recompute_kinds, prediction_stage=other.prediction_stage
    )


def check_rows(other: Alternative) -> None:
    assert other.recompute == {name: placement_of(other).recomputed(name) for name in other.layers}


@settings(max_examples=how_many(15, 150), deadline=None)
@given(seed=st.integers(0, 10_000))
def test_an_alternative_of_one_layout_has_the_price_of_its_record(seed: int) -> None:
    job = random_job(seed)
    options = SearchOptions(time_limit_s=0.25, num_workers=1, space=job.space, with_relaxations=False)
    try:
        plan = search(job.profile, job.cluster, job.global_batch_size, options)
    except AutoParallelError:
        return
    for other in Plan.parse(json.loads(plan.text())).alternatives:
        check_rows(other)
        found = evaluate(job.profile, job.cluster, other.layout, placement_of(other), job.global_batch_size)
        assert found.step.total_us == pytest.approx(other.step_us)
        assert max(rank.peak_bytes for rank in found.memory) == other.peak_bytes


@settings(max_examples=how_many(8, 60), deadline=None)
@given(
    capacity=st.integers(150, 900),
    batch=st.sampled_from([4, 8]),
    devices=st.sampled_from([2, 4]),
    generator=st.sampled_from([0, 0, 2]),
)
def test_an_alternative_with_encoders_of_their_own_has_step_and_peak_of_the_plan_in_its_layout(
    capacity: int, batch: int, devices: int, generator: int
) -> None:
    profile = small_profile(capacity_mib=capacity, generator_layers=generator)
    cluster = Cluster(num_nodes=1, devices_per_node=devices)
    try:
        plan = search_hetero(profile, cluster, batch, SearchOptions(top_k=3), memory_modes=SUMMED_MODES)
    except InfeasiblePlan:
        return
    for other in plan.alternatives:
        check_rows(other)
        only = SearchOptions(layouts=[replace(other.layout, modules={}, meets=False)], top_k=1)
        alone = search_hetero(profile, cluster, batch, only, memory_modes=SUMMED_MODES)
        if alone.layout != other.layout or alone.step.total_us != pytest.approx(other.step_us):
            continue  # an equally fast choice of encoder sizes
        assert other.peak_bytes == peak_bytes(alone)
        for name, kinds in other.recompute_kinds.items():
            assert kinds == {kind: alone.recomputed_of(name, kind) for kind in kinds}

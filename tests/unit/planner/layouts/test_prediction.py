"""Layers of multi-token prediction as a unit of their own: beside layers, beside the loss, or alone, as enumerated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise, product

import pytest
from small_profile import block, small_profile

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan, PlanError
from mindspeed_autoparallel.planner.evaluate import evaluate
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.split import Placement, SplitProblem, solve, stage_memory, time_of
from mindspeed_autoparallel.planner.split.from_profile import problem_from_profile
from mindspeed_autoparallel.profiles import MeasuredAt, Measurement, ModuleCost, Profile
from mindspeed_autoparallel.runtime.megatron.layout_arguments import pipeline_layout
from mindspeed_autoparallel.spec import Cluster, Layout, Model, Module, Plan
from mindspeed_autoparallel.units import MIB

NAME, NUM_LAYERS = "text_decoder", 4


def _language_model(
    capacity_mib: int = 4000, *, heavy: bool = True, tied: bool = False, num_layers: int = NUM_LAYERS
) -> Profile:
    """A few layers; ``heavy``: prediction and loss take as long as a layer each."""
    cost = ModuleCost(
        pre=block(20),
        layer=block(900, saved_mib=30, recomputable=True),
        prediction=block(950 if heavy else 300, saved_mib=33, output_bytes=2 * MIB),
        post=block(800 if heavy else 200, saved_mib=21),
    )
    module = Module(name=NAME, result_key="llm", num_layers=num_layers)
    return small_profile(
        capacity_mib=capacity_mib,
        model=Model(name="small", modules=(module,), sequence_length=128, tied_embeddings=tied),
        measurements=(Measurement(at=MeasuredAt(), modules={NAME: cost}),),
    )


def _layout(size: int, chunks: int) -> Layout:
    schedule = "interleaved" if chunks > 1 else "1f1b"
    return Layout(pipeline_size=size, virtual_size=chunks, schedule=schedule, standalone_ends=True)


def _placements(layout: Layout) -> Iterator[ModulePlacement]:
    """Every row of layers with something on every stage, prediction beside the loss or one stage before."""
    num = layout.num_virtual_stages
    for row in product(range(NUM_LAYERS + 1), repeat=num):
        if sum(row) != NUM_LAYERS:
            continue
        for apart in (None, num - 2) if layout.pipeline_size >= 3 else (None,):
            if apart is not None and row[-1]:
                continue
            if any(not count and v not in (0, num - 1, apart) for v, count in enumerate(row)):
                continue
            for again in product(*(range(count + 1) for count in row)):
                yield ModulePlacement(layers={NAME: row}, recompute={NAME: {"full": again}}, prediction_stage=apart)


@pytest.mark.parametrize(
    ("size", "chunks", "capacity_mib", "heavy"),
    [
        (2, 1, 4000, True),
        (3, 1, 4000, True),
        (3, 1, 360, True),
        (4, 1, 4000, True),
        (4, 1, 4000, False),
        (4, 1, 300, True),
        (4, 1, 190, False),
        (2, 2, 400, True),
        (3, 2, 4000, True),
        (3, 2, 330, True),
    ],
)
def test_plans_equal_enumeration(size: int, chunks: int, capacity_mib: int, heavy: bool) -> None:
    profile, cluster = _language_model(capacity_mib, heavy=heavy), Cluster(num_nodes=1, devices_per_node=size)
    layout = _layout(size, chunks)
    found = (evaluate(profile, cluster, layout, item, 6, with_timeline=False) for item in _placements(layout))
    steps = [item.step.total_us for item in found if item.fits]
    if not steps:
        with pytest.raises(InfeasiblePlan):
            search(profile, cluster, 6, SearchOptions(layouts=[layout]))
        return
    plan = search(profile, cluster, 6, SearchOptions(layouts=[layout]))
    assert plan.search.lower_bound_us <= min(steps) * (1 + 1e-9) <= plan.step.total_us * (1 + 2e-9)
    assert plan.step.total_us <= min(steps) / (1 - plan.search.gap_fraction) * (1 + 1e-9)
    assert plan.search.gap_fraction < 0.005
    assert plan.step.total_us <= min(steps) * 1.0005


def _plan(profile: Profile, size: int = 4, chunks: int = 1) -> Plan:
    options = SearchOptions(layouts=[_layout(size, chunks)])
    return search(profile, Cluster(num_nodes=1, devices_per_node=size), 12, options)


def _holds_prediction(plan: Plan) -> list[int]:
    return [stage.stage for stage in plan.stages if stage.prediction]


@pytest.mark.megatron
@pytest.mark.parametrize("chunks", [1, 2])
def test_heavy_prediction_is_apart_from_the_loss_in_megatrons_layout_string(chunks: int) -> None:
    plan = _plan(_language_model(), 3 if chunks > 1 else 4, chunks)
    assert _holds_prediction(plan) == [len(plan.stages) - 2]
    text = pipeline_layout(plan, 1)
    assert text.endswith("m|L")
    again, found = replay(Plan.parse(json.loads(plan.text())))
    assert _holds_prediction(again) == _holds_prediction(plan)
    assert found.fits and again.step.total_us == pytest.approx(plan.step.total_us)
    with pytest.raises(PlanError, match="the script trains none"):
        pipeline_layout(plan, 0)
    layouts = pytest.importorskip("megatron.core.transformer.pipeline_parallel_layer_layout")
    host = layouts.PipelineParallelLayerLayout(text, plan.layout.pipeline_size)
    assert host.validate_layer_layout(NUM_LAYERS, 1), "Megatron finds it apart"


def test_prediction_stays_with_the_loss_beside_a_tied_embedding_or_if_the_host_requires_it() -> None:
    assert _holds_prediction(_plan(_language_model(tied=True))) == []
    plan = _plan(_language_model(), 2)
    assert _holds_prediction(plan) == []
    assert pipeline_layout(plan, 1).endswith("mL")


def test_a_stage_that_cannot_hold_prediction_is_refused_with_the_rule() -> None:
    plan = _plan(_language_model())
    first = replace(plan.stages[0], prediction=True)
    wrong = replace(plan, stages=(first, *(replace(stage, prediction=False) for stage in plan.stages[1:])))
    with pytest.raises(ConfigError, match="virtual stage 0 cannot hold the layers of multi-token prediction"):
        pipeline_layout(wrong, 1)
    with pytest.raises(ConfigError, match="on the last chunk of a rank other than the first, behind all layers"):
        replay(wrong)


def _by_hand(problem: SplitProblem) -> Iterator[Placement]:
    """Every cut of the row of units of a split problem with nothing recomputed."""
    units = [k for k, segment in enumerate(problem.segments) for _ in range(segment.num_layers)]
    for ends in product(range(1, len(units)), repeat=problem.num_virtual - 1):
        bounds = [0, *ends, len(units)]
        if any(high <= low for low, high in pairwise(bounds)):
            continue
        held = [units[low:high] for low, high in pairwise(bounds)]
        yield tuple(
            tuple(tuple(here.count(k) if not q else 0 for here in held) for q in range(len(segment.kinds)))
            for k, segment in enumerate(problem.segments)
        )


@pytest.mark.parametrize(("size", "chunks"), [(2, 1), (3, 1), (4, 1), (3, 2)])
def test_split_equals_enumeration(size: int, chunks: int) -> None:
    problem = problem_from_profile(
        _language_model(num_layers=6),
        num_stages=size,
        num_microbatches=6,
        memory_limit_mib=4000,
        schedule="interleaved" if chunks > 1 else "1f1b",
        num_chunks=chunks,
        standalone_ends=True,
    )
    fits = [
        placement
        for placement in _by_hand(problem)
        if all(a <= b for a, b in zip(stage_memory(problem, placement), problem.memory_limit, strict=True))
        and (size >= 3 or placement[-2] == placement[-1])
    ]
    solution = solve(problem)
    assert solution.status == "optimal"
    assert solution.step_time == min(time_of(problem, placement) for placement in fits)

"""Measured profiles: the step of a plan is one function of its placement, and no bound of the search is above it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from small_profile import small_profile

from mindspeed_autoparallel.planner.candidate import Candidate
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluate
from mindspeed_autoparallel.planner.layouts.bounds import pipeline_bound_ns, tail_bound_us
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.search import search
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.planner.rank_memory import point_of
from mindspeed_autoparallel.planner.replay import replay
from mindspeed_autoparallel.planner.stage_times import NS_PER_US
from mindspeed_autoparallel.planner.tuner.candidates import Configuration, ProfileVariant
from mindspeed_autoparallel.planner.tuner.placements import evaluate_placement
from mindspeed_autoparallel.profiles import BlockCost, Collective, LinkTier, Profile, StateBytes
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.units import MIB


def _drawn_profile(drawn: random.Random, *, both: bool) -> Profile:
    """A profile whose collectives take between a hundredth and ten times the last backward."""
    profile = small_profile(capacity_mib=drawn.choice([250, 400, 2000]))
    link = LinkTier(
        default=Collective(latency_us=drawn.choice([0.0, 5.0, 400.0]), bytes_per_s=10 ** drawn.uniform(9, 12))
    )
    device = replace(profile.device, intra=link, inter=link, optimizer_step_us_per_byte=10 ** drawn.uniform(-7, -4))
    frozen = drawn.choice(["", "", "image_encoder", "text_decoder"]) if both else ""

    def changed(name: str, block: BlockCost | None) -> BlockCost | None:
        if block is None:
            return None
        if name == frozen:
            return replace(block, dense=StateBytes(num_parameters=MIB, parameter_bytes=2 * MIB))
        return replace(block, backward_us=drawn.uniform(0.5, 3) * block.forward_us)

    points = [
        replace(
            point,
            modules={
                name: replace(cost, **{part: changed(name, getattr(cost, part)) for part in ("pre", "layer", "post")})
                for name, cost in point.modules.items()
                if both or name == "text_decoder"
            },
        )
        for point in profile.measurements[:1]
    ]
    modules = profile.model.modules if both else (replace(profile.model.modules[1], predecessors=()),)
    model = replace(profile.model, modules=modules)
    return replace(profile, device=device, model=model, measurements=tuple(points))


def _drawn_layout(drawn: random.Random, *, both: bool) -> Layout:
    pipeline = drawn.choice([1, 2, 3])
    chunks = 2 if pipeline == 2 and not both and drawn.random() < 0.3 else 1
    distributed, reduced = drawn.random() < 0.7, drawn.random() < 0.7
    return Layout(
        pipeline_size=pipeline,
        virtual_size=chunks,
        schedule="interleaved" if chunks > 1 else "1f1b",
        data_size=drawn.choice([1, 2, 4]),
        distributed_optimizer=distributed,
        overlap_gradient_reduce=reduced,
        overlap_parameter_gather=reduced and distributed and drawn.random() < 0.5,
        bucket_elements=drawn.choice([0, MIB, 3 * MIB]),
    )


def _placements(profile: Profile, layout: Layout) -> Iterator[ModulePlacement]:
    sizes = [module.num_layers for module in profile.model.modules]
    total, num = sum(sizes), layout.num_virtual_stages
    for cuts in combinations(range(1, total), num - 1):
        edges = (0, *cuts, total)
        layers, start = {}, 0
        for module in profile.model.modules:
            end = start + module.num_layers
            layers[module.name] = tuple(max(0, min(b, end) - max(a, start)) for a, b in pairwise(edges))
            start = end
        for again in (0, 1, 4):
            yield ModulePlacement(
                layers=layers,
                recompute={name: {"full": tuple(min(again, n) for n in row)} for name, row in layers.items()},
            )


def _check(seed: int) -> str:
    drawn = random.Random(seed)
    both = drawn.random() < 0.5
    profile, layout = _drawn_profile(drawn, both=both), _drawn_layout(drawn, both=both)
    batch = layout.data_size * drawn.choice([2, 4])
    cluster = Cluster(num_nodes=1, devices_per_node=layout.pipeline_size * layout.data_size)
    measurement = point_of(profile, layout)
    assert measurement is not None
    candidate = Candidate(
        profile=profile,
        cluster=cluster,
        layout=layout,
        measurement=measurement,
        num_microbatches=layout.num_microbatches(batch),
    )
    found: list[tuple[ModulePlacement, Evaluation]] = [
        (placement, evaluate(profile, cluster, layout, placement, batch, with_timeline=False))
        for placement in _placements(profile, layout)
    ]
    bound_us = pipeline_bound_ns(candidate) / NS_PER_US + tail_bound_us(candidate)
    assert bound_us <= min(one.step.total_us for _, one in found) * (1 + 1e-9)
    fitting = [one.step.total_us for _, one in found if one.fits]
    if not fitting:
        return "full"
    plan = search(profile, cluster, batch, SearchOptions(layouts=[layout], with_relaxations=False))
    assert plan.search.lower_bound_us <= min(fitting) * (1 + 1e-9)
    again, _ = replay(plan)
    assert again.step.total_us == pytest.approx(plan.step.total_us, rel=1e-9)
    if not both:
        (layers,) = ModulePlacement.of_plan(plan).layers.values()
        configuration = Configuration(
            variant=ProfileVariant(name="", settings={}, profile=profile), candidate=candidate, bound_us=bound_us
        )
        for number in (0, 1):
            tuned = evaluate_placement(configuration, layers, "full" if number else "none", number)
            same = evaluate(profile, cluster, layout, tuned.placement, batch)
            assert tuned.step_us == pytest.approx(same.step.total_us, rel=1e-12)
    if plan.search.status == "optimal":
        assert plan.step.total_us <= min(fitting) * (1 + 1e-6)
    return str(plan.search.status)


def test_no_bound_is_above_a_plan_of_a_drawn_measured_profile() -> None:
    outcomes = [_check(seed) for seed in range(26)]
    assert outcomes.count("optimal") > 20, outcomes


@pytest.mark.long
def test_no_bound_is_above_a_plan_of_many_drawn_measured_profiles() -> None:
    for seed in range(100, 600):
        _check(seed)

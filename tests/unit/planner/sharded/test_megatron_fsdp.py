"""Megatron-FSDP's rules: a step computed by hand, and searches against all choices tried."""

import itertools
import random
from dataclasses import replace

import pytest
from how_many import how_many
from sharded_profile import decisions_of, drawn_profile

from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.hosts.megatron_own_fsdp import megatron_fsdp_host
from mindspeed_autoparallel.hosts.script import Script
from mindspeed_autoparallel.planner.sharded.bounds import step_bound_ns
from mindspeed_autoparallel.planner.sharded.buckets import lowering_of, unit_choices
from mindspeed_autoparallel.planner.sharded.layers import LayerSearch
from mindspeed_autoparallel.planner.sharded.pricing import priced
from mindspeed_autoparallel.planner.sharded.problem import Problem
from mindspeed_autoparallel.planner.sharded.search import search_sharded
from mindspeed_autoparallel.planner.sharded.space import Switches, decided, sizes_of
from mindspeed_autoparallel.profiles.sharded import CostPoint
from mindspeed_autoparallel.schedule.sharded import StreamModule, StreamTraining, Unit, replay
from mindspeed_autoparallel.spec.layout import Cluster
from mindspeed_autoparallel.spec.sharded import KEEP, MEGATRON_FSDP, RECOMPUTE, ShardSizes

HOST = megatron_fsdp_host(Script())
LAYERS = "model.layers.{*}"


def two_layers(**more):
    """Embedding and head in the bucket that stays, two layers behind it; every bucket has ten elements."""
    units = [
        Unit(
            name=name,
            elements=10,
            gather_ns=4,
            reduce_ns=6,
            reshard_after_forward=name != "outside",
            gathered_bytes=100,
            reduced_bytes=50,
            sharded_gradient_bytes=1,
        )
        for name in ("outside", "first", "second")
    ]
    layer = {"parent": 0, "forward_ns": 10, "backward_ns": 20, "again_ns": 10, "gradient_bytes": 1, "reentrant": True}
    modules = (
        StreamModule(name="", input_requires_grad=False),
        StreamModule(name="embedding", parent=0, parameters_of=0, forward_ns=2, backward_ns=2, gradient_bytes=1),
        StreamModule(name="first", units=(1,), parameters_of=1, **layer | more),
        StreamModule(name="second", units=(2,), parameters_of=2, **layer | more),
        StreamModule(name="head", parent=0, parameters_of=0, forward_ns=3, backward_ns=3, gradient_bytes=1),
    )
    return StreamTraining(modules=modules, units=tuple(units), variant=MEGATRON_FSDP, unit_elements=15, optimizer_ns=5)


def test_a_step_of_two_layers_is_what_is_computed_by_hand():
    spans = [
        ("gather", "outside", 0, 4),
        ("gather", "first", 4, 8),
        ("F", "embedding", 4, 6),
        ("gather", "second", 8, 12),
        ("F", "first", 8, 18),
        ("F", "second", 18, 28),
        ("F", "head", 28, 31),
        ("B", "head", 31, 34),
        ("gather", "first", 34, 38),  # in backward its own comes last
        ("gather", "second", 38, 42),
        ("B", "second", 42, 62),
        ("reduce", "second", 62, 68),
        ("B", "first", 62, 82),
        ("reduce", "first", 82, 88),
        ("B", "embedding", 82, 84),
        ("reduce", "outside", 88, 94),
    ]
    found = replay(two_layers(), with_spans=True)
    shown = [(*what, start, end) for _, what, start, end in found.spans if what != "optimizer" and end > start]
    assert shown == spans
    # Twenty elements are in front of the last reduction, and the unit size is fifteen.
    assert [what[1] for _, what, *_ in found.spans if what[0] == "wait for reductions"] == [1, 2]
    assert found.step_ns == 94 + 5
    # All three buckets, three shards' gradients, and the buffers of the second layer's and the head's gradients.
    assert (found.peak_bytes, found.peak_point) == (3 * 100 + 3 + 2 * 50, "backward of second")


def test_a_recomputed_layer_is_gathered_alone_and_once():
    spans = replay(two_layers(policy=RECOMPUTE), with_spans=True).spans
    after = [what for _, what, *_ in spans]
    after = after[after.index(("B", "head")) :]
    named = [("gather", "second"), ("wait", "second"), ("A", "second"), ("gather", "first"), ("B", "second")]
    assert after[1:6] == named
    named = [("free", "second"), ("wait", "first"), ("A", "first"), ("B", "first"), ("reduce", "first")]
    assert after[7:12] == named


def test_a_second_micro_batch_gathers_layers_and_not_what_stays():
    spans = replay(replace(two_layers(), accumulation=2), with_spans=True).spans
    shown = [what[1] for _, what, *_ in spans if what[0] == "gather" or what == ("F", "embedding")]
    layers = ["first", "second"]
    first = ["outside", "first", "embedding", "second", *layers]
    assert shown == [*first, "embedding", *layers, *layers]


def drawn(seed):
    """A problem, its shipped decisions and the generator."""
    generator = random.Random(seed)
    points = tuple(CostPoint(micro_batch_size=size) for size in (1, 2))
    profile = drawn_profile(generator, generator.randint(1, 5), points=points)
    host = replace(HOST, unit_elements=generator.choice((0, 10**7)))
    sizes = ShardSizes(num_devices=8, fully_shard_size=8, accumulation=generator.choice((2, 4)))
    decisions = replace(decisions_of(profile, sizes), unit_elements=host.unit_elements)
    kept = tuple(one for one in decisions.groups if one.pattern in (LAYERS, ""))
    shipped = replace(decisions, groups=kept if generator.random() < 0.5 else decisions.groups)
    return Problem(profile, host, 8), shipped, generator


def all_choices(problem, shipped):
    """Return all outcomes of sizes, unit sizes and numbers of recomputed first layers."""
    number = sum(one.is_layer for one in problem.profile.modules)
    found = []
    for sizes in sizes_of(problem, 8, shipped.sizes.global_batch_size):
        for unit, layers in itertools.product(unit_choices(problem), range(number + 1)):
            decisions = decided(shipped, problem, sizes, Switches(unit_elements=unit))
            row = (RECOMPUTE,) * layers + (KEEP,) * (number - layers)
            found.append(priced(problem, replace(decisions, policies={LAYERS: row} if layers else {}), 2**60))
    return found


def test_searches_equal_all_choices_tried():
    outcomes = []
    for seed in range(how_many(16, 40)):
        problem, shipped, generator = drawn(seed)
        tried = all_choices(problem, shipped)
        peaks = [one.memory.peak_bytes for one in tried]
        limit = int(min(peaks) + generator.random() * (max(peaks) - min(peaks))) if seed % 8 else min(peaks) - 1
        fitting = [one.step.total_us for one in tried if one.memory.peak_bytes <= limit]
        cluster = Cluster(num_nodes=1, devices_per_node=8, memory_limit_bytes=limit)
        outcomes.append(bool(fitting))
        if not fitting:
            with pytest.raises(InfeasiblePlan):
                search_sharded(problem.profile, cluster, problem.host, shipped)
            continue
        plan = search_sharded(problem.profile, cluster, problem.host, shipped)
        assert min(fitting) <= plan.step.total_us <= min(fitting) * 1.0021, seed
        assert plan.memory.peak_bytes <= limit, seed
        assert plan.search.lower_bound_us <= min(fitting), seed
        for one in tried:
            lowering = lowering_of(problem, one.decisions)
            bound = step_bound_ns(lowering, one.memory.peak_bytes)
            assert bound is not None and bound <= one.step.total_us * 1000, (seed, one.decisions)
            search = LayerSearch(lowering, one.memory.peak_bytes)
            assert search.may_fit() or not search.solve(), seed
    assert len(set(outcomes)) == 2

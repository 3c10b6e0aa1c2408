"""Layers of several kinds: stages cost what the layers they hold cost, and nothing that could be best is passed over."""

import itertools
import random
from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.cost.memory import PlacedBlock, static_terms
from mindspeed_autoparallel.planner.tuner.balanced import balanced_splits
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.placement_bounds import may_fit, placement_bound_us
from mindspeed_autoparallel.planner.tuner.placements import evaluate_placement, even_or_balanced_splits, solve
from mindspeed_autoparallel.planner.tuner.search import search
from mindspeed_autoparallel.profiles import RecomputeCost, mean_layer
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import RecomputePolicy

CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=4), 16
DIMENSIONS = Dimensions(virtual_sizes=(1, 2))
PATTERN = (0, 0, 0, 1, 1, 1, 1, 0)


def mixed_profile(capacity_mib):
    """Three light layers, four heavy ones, a light one."""
    profile = language_profile(num_layers=len(PATTERN), capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2))

    def mix(module):
        heavy = replace(
            module.layer,
            forward_us=2.5 * module.layer.forward_us,
            backward_us=2 * module.layer.backward_us,
            dense=replace(module.layer.dense, optimizer_bytes=5 * module.layer.dense.optimizer_bytes),
            recompute={
                kind: replace(cost, saved_bytes=2 * cost.saved_bytes, extra_backward_us=2 * cost.extra_backward_us)
                for kind, cost in module.layer.recompute.items()
            },
        )
        kinds = (module.layer, heavy)
        return replace(module, layer=mean_layer(kinds, PATTERN), kinds=kinds, pattern=PATTERN)

    return replace(
        profile,
        measurements=tuple(
            replace(item, modules={name: mix(module) for name, module in item.modules.items()})
            for item in profile.measurements
        ),
    )


def random_profile(seed, capacity_mib):
    """Kinds of layers that differ in work, in what they save, and in what each way to compute again takes and frees."""
    profile = language_profile(num_layers=8, capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2))
    draw = random.Random(seed)
    pattern = draw.choice([PATTERN, (0, 1) * 4, (0, 1, 2, 0, 1, 2, 0, 1), (0,) * 7 + (1,)])
    shares = [
        [draw.choice([0.4, 1, 2.5]), draw.choice([0.5, 1, 2]), *((draw.random(), draw.random()) for _ in range(3))]
        for _ in set(pattern)
    ]

    def kind_of(layer, work, size, *ways):
        forward_us = work * layer.forward_us
        plain = replace(layer.recompute["none"], saved_bytes=round(size * layer.recompute["none"].saved_bytes))
        modules = {
            f"selective:{name}": RecomputeCost(
                saved_bytes=round(plain.saved_bytes * kept),
                extra_backward_us=forward_us * extra,
                backward_peak_bytes=plain.backward_peak_bytes + round(plain.saved_bytes * (1 - kept)),
            )
            for name, (kept, extra) in zip(("layernorm", "mlp", "core_attn"), ways, strict=True)
        }
        full = replace(layer.recompute["full"], extra_backward_us=forward_us, backward_peak_bytes=plain.saved_bytes)
        return replace(
            layer, forward_us=forward_us, backward_us=2 * forward_us, recompute={"none": plain, **modules, "full": full}
        )

    def mix(module):
        kinds = tuple(kind_of(module.layer, *share) for share in shares)
        return replace(module, layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)

    return replace(
        profile,
        measurements=tuple(
            replace(item, modules={name: mix(module) for name, module in item.modules.items()})
            for item in profile.measurements
        ),
    )


def space(capacity_mib=30_000, profile=None):
    variant = ProfileVariant(name="", settings={}, profile=profile or mixed_profile(capacity_mib))
    return enumerate_space([variant], CLUSTER, BATCH, DIMENSIONS)


def ways(configuration, with_groups=False):
    layer = configuration.candidate.measurement.modules["text_decoder"].layer
    for layers in even_or_balanced_splits(configuration, DIMENSIONS):
        for kind in layer.recompute:
            for number in range(1, max(layers) + 1) if kind == "full" else (0,):
                yield layers, kind, number
        for size in range(2, max(layers) + 1) if with_groups else ():
            yield layers, str(RecomputePolicy.full(size)), max(layers)


def test_a_stage_takes_what_its_own_layers_take():
    configuration = next(
        item
        for item in space().configurations
        if (item.layout.pipeline_size, item.layout.virtual_size, item.layout.tensor_size) == (4, 1, 1)
    )
    light, heavy = configuration.candidate.measurement.modules["text_decoder"].kinds
    found = evaluate_placement(configuration, (2, 2, 2, 2), "none", 0)
    times = [stage.forward_us for stage in found.evaluation.stages]
    inner = [light.forward_us + heavy.forward_us, 2 * heavy.forward_us]
    assert times[1:3] == pytest.approx(inner)


@pytest.mark.parametrize("capacity_mib", [9_000, 16_000, 30_000])
def test_bounds_hold_and_only_what_cannot_fit_is_ruled_out(capacity_mib):
    refused = 0
    for configuration in space(capacity_mib).configurations:
        for layers, kind, number in ways(configuration):
            found = evaluate_placement(configuration, layers, kind, number)
            assert configuration.bound_us <= found.step_us * (1 + 1e-9)
            assert placement_bound_us(configuration, layers, kind, number) <= found.step_us * (1 + 1e-9)
            if not may_fit(configuration, layers, kind, number):
                assert not found.evaluation.fits
                refused += 1
    assert refused or capacity_mib == 30_000


def test_the_search_finds_what_solving_every_configuration_finds():
    found = space(24_000)
    best = {}
    for configuration in found.configurations:
        solved, _ = solve(configuration, replace(DIMENSIONS, uneven_stages=False))
        if solved is not None:
            best[configuration.key] = min(solved.step_us, best.get(configuration.key, solved.step_us))
    outcome = search(found, replace(DIMENSIONS, uneven_stages=False))
    assert [item.step_us for item in outcome.top] == pytest.approx(sorted(best.values())[:3])


@pytest.mark.parametrize("capacity_mib", [9_000, 13_000, 18_000])
def test_the_fastest_recompute_that_fits_is_found_for_any_costs_of_each_kind_of_layers(capacity_mib):
    used = set()
    for seed in range(3):
        configurations = space(profile=random_profile(seed, capacity_mib)).configurations
        for configuration in (item for item in configurations if item.layout.distributed_optimizer):
            found = [
                evaluate_placement(configuration, *way, dimensions=DIMENSIONS)
                for way in ways(configuration, with_groups=True)
            ]
            fitting = [item.step_us for item in found if item.evaluation.fits]
            best, _ = solve(configuration, DIMENSIONS)
            where = f"{configuration.layout.label()}, seed {seed}"
            assert (best is None) == (not fitting), where
            if best is not None:
                assert best.step_us == pytest.approx(min(fitting)), where
                used.add(best.recompute)
    assert len(used) > 1


def test_a_kind_that_adds_less_on_average_may_be_slower_on_the_slowest_stage():
    """One heavy layer in eight is alone on its stage: what costs it nothing wins, though the others pay more."""

    def mix(module):
        plain = module.layer.recompute["none"]

        def kind_of(work, extras):
            return replace(
                module.layer,
                forward_us=work * module.layer.forward_us,
                backward_us=work * module.layer.backward_us,
                recompute={
                    "none": replace(plain, saved_bytes=64 * plain.saved_bytes),
                    **{
                        f"selective:{name}": replace(
                            plain, saved_bytes=plain.saved_bytes // 2, extra_backward_us=extra * module.layer.forward_us
                        )
                        for name, extra in extras.items()
                    },
                },
            )

        kinds = (kind_of(1.0, {"mlp": 0.0, "core_attn": 0.2}), kind_of(6.0, {"mlp": 1.0, "core_attn": 0.0}))
        pattern = (0, 0, 0, 1, 0, 0, 0, 0)
        return replace(module, layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)

    profile = mixed_profile(40_000)
    profile = replace(
        profile,
        measurements=tuple(
            replace(
                item,
                modules={name: mix(replace(module, kinds=(), pattern=())) for name, module in item.modules.items()},
            )
            for item in profile.measurements
        ),
    )
    configuration = next(
        item
        for item in space(profile=profile).configurations
        if (item.layout.pipeline_size, item.layout.virtual_size, item.layout.micro_batch_size) == (4, 2, 1)
    )
    extra = {
        name: cost.extra_backward_us
        for name, cost in configuration.candidate.measurement.modules["text_decoder"].layer.recompute.items()
    }
    best, _ = solve(configuration, DIMENSIONS)
    assert extra["selective:mlp"] < extra["selective:core_attn"]
    assert best.recompute == "selective:core_attn"


@pytest.mark.parametrize("seed", range(4))
def test_balanced_splits_have_the_smallest_largest_stage_of_all_splits(seed):
    profile = random_profile(seed, 20_000)
    for configuration in space(profile=profile).configurations:
        layout = configuration.layout
        num = layout.num_virtual_stages
        (module,) = configuration.candidate.measurement.modules.values()
        found = balanced_splits(configuration)
        if num == 1:
            assert found == []
            continue

        def largest(layers, size_of, module=module, num=num):
            sizes, start = [], 0
            for stage, count in enumerate(layers):
                held = [block for block, number in module.runs(start, count) for _ in range(number)]
                held += [module.pre] * (stage == 0) + [module.post] * (stage == num - 1)
                sizes.append(sum(size_of(block, stage) for block in held))
                start += count
            return max(sizes)

        cuts = itertools.combinations(range(1, 8), num - 1)
        every = [tuple(b - a for a, b in itertools.pairwise((0, *cut, 8))) for cut in cuts]
        measures = [lambda block, stage: block.forward_us + block.backward_us]
        if layout.virtual_size == 1:
            in_flight = [min(num - stage, configuration.candidate.num_microbatches) for stage in range(num)]
            measures += [
                lambda block, stage, way=way, held=in_flight, layout=layout: (
                    sum(static_terms([PlacedBlock(name="", cost=block)], layout).values())
                    + held[stage] * block.recompute[way].saved_bytes
                )
                for way in ("none", "full")
            ]
        assert len(found) == len(measures)
        for layers, size_of in zip(found, measures, strict=True):
            assert largest(layers, size_of) <= 1.001 * min(largest(other, size_of) for other in every)


def test_a_stack_that_fits_only_where_heavy_layers_are_spread_is_found_to_fit():
    """Two heavy layers at the end: an even split puts both on one rank."""

    def mix(module):
        heavy = replace(
            module.layer, dense=replace(module.layer.dense, optimizer_bytes=8 * module.layer.dense.optimizer_bytes)
        )
        pattern = (0, 0, 0, 0, 0, 0, 1, 1)
        return replace(
            module, kinds=(module.layer, heavy), pattern=pattern, layer=mean_layer((module.layer, heavy), pattern)
        )

    plain = language_profile(num_layers=8, capacity_mib=26_000, tensor=(1,), batches=(1,))
    profile = replace(
        plain,
        measurements=tuple(
            replace(item, modules={name: mix(module) for name, module in item.modules.items()})
            for item in plain.measurements
        ),
    )
    configuration = next(
        item
        for item in space(profile=profile).configurations
        if item.layout.pipeline_size == 4 and item.layout.virtual_size == 1 and item.layout.distributed_optimizer
    )
    even, _ = solve(configuration, replace(DIMENSIONS, uneven_stages=False))
    found, _ = solve(configuration, DIMENSIONS)
    assert even is None
    assert found is not None and found.placement.layers["text_decoder"][-1] == 1

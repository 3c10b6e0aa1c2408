"""Layers of several kinds: stages cost what the layers they hold cost, and nothing that could be best is passed over."""

from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.profiles import mean_layer
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.tuning.traced.candidates import Dimensions, Family, enumerate_space
from mindspeed_autoparallel.tuning.traced.search import (
    _evaluated,
    _may_fit,
    _placement_bound_us,
    _splits,
    search,
    solve,
)

CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=4), 16
DIMENSIONS = Dimensions(virtual_sizes=(1, 2))
PATTERN = (0, 0, 0, 1, 1, 1, 1, 0)


def mixed_profile(capacity_mib):
    """Three light layers, four heavy ones, a light one."""
    profile = language_profile(num_layers=len(PATTERN), capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2))

    def mix(module):
        heavy = replace(
            module.layer, forward_us=2.5 * module.layer.forward_us, backward_us=2 * module.layer.backward_us,
            dense=replace(module.layer.dense, optimizer_bytes=5 * module.layer.dense.optimizer_bytes),
            recompute={
                kind: replace(cost, saved_bytes=2 * cost.saved_bytes, extra_backward_us=2 * cost.extra_backward_us)
                for kind, cost in module.layer.recompute.items()
            },
        )  # fmt: skip
        kinds = (module.layer, heavy)
        return replace(module, layer=mean_layer(kinds, PATTERN), kinds=kinds, pattern=PATTERN)

    return replace(profile, measurements=tuple(
        replace(item, modules={name: mix(module) for name, module in item.modules.items()})
        for item in profile.measurements
    ))  # fmt: skip


def space(capacity_mib=30_000):
    return enumerate_space(
        [Family(name="", settings={}, profile=mixed_profile(capacity_mib))], CLUSTER, BATCH, DIMENSIONS
    )


def ways(configuration):
    layer = configuration.candidate.measurement.modules["text_decoder"].layer
    for layers in _splits(configuration, DIMENSIONS):
        for kind in layer.recompute:
            for number in range(1, max(layers) + 1) if kind == "full" else (0,):
                yield layers, kind, number


def test_a_stage_takes_what_its_own_layers_take():
    configuration = next(
        item for item in space().configurations
        if (item.layout.pipeline_size, item.layout.virtual_size, item.layout.tensor_size) == (4, 1, 1)
    )  # fmt: skip
    light, heavy = configuration.candidate.measurement.modules["text_decoder"].kinds
    found = _evaluated(configuration, CLUSTER, BATCH, (2, 2, 2, 2), "none", 0)
    times = [stage.forward_us for stage in found.evaluation.stages]
    inner = [light.forward_us + heavy.forward_us, 2 * heavy.forward_us]
    assert times[1:3] == pytest.approx(inner)


@pytest.mark.parametrize("capacity_mib", [9_000, 16_000, 30_000])
def test_bounds_hold_and_only_what_cannot_fit_is_ruled_out(capacity_mib):
    refused = 0
    for configuration in space(capacity_mib).configurations:
        for layers, kind, number in ways(configuration):
            found = _evaluated(configuration, CLUSTER, BATCH, layers, kind, number)
            assert configuration.bound_us <= found.step_us * (1 + 1e-9)
            assert _placement_bound_us(configuration, layers, kind, number) <= found.step_us * (1 + 1e-9)
            if not _may_fit(configuration, CLUSTER, layers, kind, number):
                assert not found.evaluation.fits
                refused += 1
    assert refused or capacity_mib == 30_000


def test_the_search_finds_what_solving_every_configuration_finds():
    found = space(24_000)
    best = {}
    for configuration in found.configurations:
        solved, _ = solve(configuration, CLUSTER, BATCH, replace(DIMENSIONS, uneven_stages=False))
        if solved is not None:
            best[configuration.key] = min(solved.step_us, best.get(configuration.key, solved.step_us))
    outcome = search(found, CLUSTER, BATCH, replace(DIMENSIONS, uneven_stages=False))
    assert [item.step_us for item in outcome.top] == pytest.approx(sorted(best.values())[:3])

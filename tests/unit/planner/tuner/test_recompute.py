"""Which layers are computed again, and in which way: the search finds what trying every way finds."""

from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import evaluate_placement, even_or_balanced_splits, solve
from mindspeed_autoparallel.profiles import RecomputeCost
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.spec.recompute import RecomputePolicy

CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=4), 32


def with_modules(profile):
    """Two more kinds: one keeps little less at hardly any time, one keeps much less."""

    def richer(measurement):
        ((name, module),) = measurement.modules.items()
        plain = module.layer.recompute["none"]
        kinds = {
            f"selective:{modules}": RecomputeCost(
                saved_bytes=round(plain.saved_bytes * kept),
                extra_backward_us=module.layer.forward_us * extra,
                backward_peak_bytes=plain.backward_peak_bytes + round(plain.saved_bytes * (1 - kept)),
            )
            for modules, kept, extra in (("layernorm", 0.9, 0.02), ("layernorm,mlp", 0.35, 0.6))
        }
        layer = replace(module.layer, recompute={**module.layer.recompute, **kinds})
        return replace(measurement, modules={name: replace(module, layer=layer)})

    return replace(profile, measurements=tuple(richer(item) for item in profile.measurements))


def configurations(capacity_mib, dimensions, num_layers=8):
    profile = with_modules(
        language_profile(num_layers=num_layers, capacity_mib=capacity_mib, tensor=(1, 2), batches=(1, 2))
    )
    space = enumerate_space([ProfileVariant(name="", settings={}, profile=profile)], CLUSTER, BATCH, dimensions)
    return [item for item in space.configurations if item.layout.distributed_optimizer]


def every_way(configuration, dimensions):
    layer = configuration.candidate.measurement.modules["text_decoder"].layer
    for layers in even_or_balanced_splits(configuration, dimensions):
        longest = max(layers)
        for kind in layer.recompute:
            for number in range(1, longest + 1) if kind == "full" else (0,):
                yield evaluate_placement(configuration, layers, kind, number, dimensions)
        for size in range(2, longest + 1):
            yield evaluate_placement(configuration, layers, str(RecomputePolicy.full(size)), longest, dimensions)


def test_the_fastest_way_that_fits_is_that_of_trying_every_one():
    dimensions, used = Dimensions(virtual_sizes=(1, 2)), set()
    for capacity_mib in (8_000, 10_500, 12_500, 15_000, 19_000, 24_000, 40_000):
        for configuration in configurations(capacity_mib, dimensions):
            fitting = [found for found in every_way(configuration, dimensions) if found.evaluation.fits]
            best, missing = solve(configuration, dimensions)
            where = f"{configuration.layout.label()} in {capacity_mib} MiB"
            assert (best is None) == (not fitting), where
            if best is None:
                assert missing is not None, where
                continue
            assert best.step_us == pytest.approx(min(found.step_us for found in fitting)), where
            used.add(best.recompute)
    assert {"none", "selective", "selective:layernorm", "selective:layernorm,mlp", "full"} <= used


def test_groups_of_layers_fit_where_the_inputs_of_single_layers_do_not():
    dimensions = Dimensions(virtual_sizes=(1,))

    def deepest(capacity_mib):
        return next(
            item
            for item in configurations(capacity_mib, dimensions, num_layers=64)
            if item.layout.pipeline_size == 4 and item.layout.micro_batch_size == 2
        )

    def peaks(kinds):
        return {kind: evaluate_placement(deepest(60_000), (16,) * 4, kind, 16).peak_bytes for kind in kinds}

    grouped = peaks(str(RecomputePolicy.full(size)) for size in range(2, 17))
    (single,) = peaks(["full"]).values()
    least = min(grouped.values())
    assert least < single
    capacity_mib = (least + single) // 2 // 2**20
    best, _ = solve(deepest(capacity_mib), dimensions)
    assert best.recompute in grouped and best.evaluation.fits
    fitting = [f for f in every_way(deepest(capacity_mib), dimensions) if f.evaluation.fits]
    assert best.step_us == pytest.approx(min(found.step_us for found in fitting))
    # Without them there is no way.
    assert solve(deepest(capacity_mib), replace(dimensions, layer_groups=False))[0] is None

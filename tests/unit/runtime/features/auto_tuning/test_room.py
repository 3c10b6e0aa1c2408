"""Recompute is not traced where even the most that a split can hold leaves room."""

from dataclasses import replace

import pytest
from language_profile import language_profile

pytest.importorskip("torch")

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.placements import evaluate_placement, even_or_balanced_splits
from mindspeed_autoparallel.profiles.records import BlockTrace, record_of
from mindspeed_autoparallel.runtime.profiling.trace.layer_signatures import fits_without_recompute
from mindspeed_autoparallel.spec import Cluster


def trace_of(profile, at):
    """What the tracing process would have written for a point of ``profile``."""

    def written(block):
        plain = block.recompute["none"]
        return {
            "saved_bytes": plain.saved_bytes,
            "forward_peak_bytes": plain.forward_peak_bytes,
            "backward_peak_bytes": plain.backward_peak_bytes,
            "output_bytes": block.output_bytes,
            "parameters": {
                "dense": {"parameter_bytes": block.dense.parameter_bytes, "num_trained": block.dense.num_parameters}
            },
        }

    ((name, module),) = profile.at(at).modules.items()
    blocks = {"pre": module.pre, "layer": module.layer, "post": module.post}
    values = {
        "bytes_per_trained_parameter": {"gradient": 4, "optimizer": 12},
        "host_bytes": 0,
        "workspace_bytes": 0,
        "batch_bytes": (0, 0),
        "modules": [
            {
                "name": name,
                "kinds": [0] * profile.model.num_layers,
                "side_bytes": (0, 0),
                "blocks": {block: written(cost) for block, cost in blocks.items()},
            }
        ],
    }
    return record_of(values, "trace", BlockTrace)


@pytest.mark.parametrize("num_layers", [8, 13])
def test_with_room_every_even_split_of_every_layout_fits_without_recompute(num_layers):
    profile = language_profile(num_layers=num_layers, tensor=(1, 2), batches=(1, 2))
    dimensions = Dimensions(virtual_sizes=(1, 2, 3, 4))
    cluster, seen = Cluster(num_nodes=1, devices_per_node=8), 0
    for measurement in profile.measurements:
        trace = trace_of(profile, measurement.at)
        least = next(room for room in range(0, 2**40, 2**28) if fits_without_recompute(trace, room))
        assert not fits_without_recompute(trace, least - 2**28)
        tight = replace(profile, device=replace(profile.device, memory_capacity_bytes=least))
        space = enumerate_space([ProfileVariant(name="", settings={}, profile=tight)], cluster, 64, dimensions)
        for configuration in space.configurations:
            if configuration.candidate.measurement.at == measurement.at:
                for layers in even_or_balanced_splits(configuration, dimensions):
                    found = evaluate_placement(configuration, layers, "none", 0)
                    assert found.evaluation.fits, configuration.layout.label()
                    seen += 1
    assert seen > 20

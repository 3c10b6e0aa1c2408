"""Steps between any two placements move every element where it belongs; simulated on all devices of a mesh."""

import itertools

import numpy

from mindspeed_autoparallel.operators.graph.node import PARTIAL, REPLICATE
from mindspeed_autoparallel.operators.graph.redistribution import moved_bytes, steps

MESH = (2, 3, 2)
WHOLE = numpy.arange(12 * 12, dtype=float).reshape(12, 12)


def piece(device, placements, whole=WHOLE):
    for dim, placement in enumerate(placements):
        if placement >= 0:
            whole = numpy.split(whole, MESH[dim], placement)[device[dim]]
    return whole


def scattered(placements):
    """A piece per device; along a pending dim the first device holds everything, twice, and the last takes it back."""
    held = {}
    for device in itertools.product(*map(range, MESH)):
        factor = 1.0
        for dim, placement in enumerate(placements):
            if placement == PARTIAL:
                factor *= {0: 2.0, MESH[dim] - 1: -1.0}.get(device[dim], 0.0)
        held[device] = piece(device, placements) * factor
    return held


def take(step, held):
    done = {}
    for device in held:
        line = [
            other for other in held if all(other[d] == device[d] for d in range(len(MESH)) if d not in step.mesh_dims)
        ]
        pieces = [held[other] for other in line]
        at = line.index(device)
        if step.before == PARTIAL:
            pieces = [sum(pieces)]
        elif step.before == REPLICATE:
            pieces = [held[device]]
        joined = numpy.concatenate(pieces, step.before) if step.before >= 0 else pieces[0]
        done[device] = numpy.split(joined, len(line), step.after)[at] if step.after >= 0 else joined
    return done


def test_every_pair_of_placements_on_a_mesh_of_three_dims_arrives():
    placements = list(itertools.product((PARTIAL, REPLICATE, 0, 1), repeat=3))
    for source in placements:
        for target in itertools.product((REPLICATE, 0, 1), repeat=3):
            held = scattered(source)
            for step in steps(source, target, WHOLE.shape, MESH):
                held = take(step, held)
            assert all(numpy.array_equal(held[device], piece(device, target)) for device in held), (source, target)


def test_gradients_of_a_replicated_weight_are_reduced_as_one_ring_over_all_devices():
    pending, whole = (PARTIAL,) * 3, (REPLICATE,) * 3
    assert moved_bytes(pending, whole, (12, 10), 10, MESH) == 2 * 11 * 1200 // 12
    # Scattered over the same devices it is half of that.
    assert moved_bytes(pending, (0, 0, 0), (12, 10), 10, MESH) == 1100

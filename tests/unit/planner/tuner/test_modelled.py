"""Switches whose effect is computed: what they change, where, how much is counted on, and how they are ranked."""

from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.cost.overlap import Offload
from mindspeed_autoparallel.errors import InfeasiblePlan
from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.modelled import (
    ExposedParts,
    Switch,
    activation_offload,
    expert_overlap,
    tensor_overlap,
    unchanged,
    with_switches,
)
from mindspeed_autoparallel.planner.tuner.search import ranked, search
from mindspeed_autoparallel.profiles import MeasuredAt
from mindspeed_autoparallel.spec import Cluster
from mindspeed_autoparallel.units import MIB

LAYER = {
    ("text_decoder", "layer", way): ExposedParts(tensor_us=90, product_us=400, exchange_us=120)
    for way in ("forward", "backward")
}
CLUSTER, DIMENSIONS = Cluster(num_nodes=1, devices_per_node=8), Dimensions(virtual_sizes=(1, 2))
OVERLAP = Switch(title="overlap", settings={"tp_comm_overlap": True}, change=tensor_overlap(lambda at: at.tensor_size))
PAIRS = Switch(title="pairs", change=expert_overlap, paired=True)
ZERO3 = Switch(
    title="ZeRO-3", change=unchanged, shards_parameters=True, environment={"CUDA_DEVICE_MAX_CONNECTIONS": ""}
)


def measurement(at=None):
    return language_profile(tensor=(1, 2, 4), batches=(1,)).at(at or MeasuredAt(tensor_size=4, sequence_parallel=True))


def layer(found):
    return found.modules["text_decoder"].layer


def variant(**changes):
    return ProfileVariant(name="", settings={"own": 1}, profile=language_profile(**changes))


def parts(item):
    return {"": {found.at: LAYER for found in item.profile.measurements}}


def test_tensor_overlap_saves_what_chunks_hide_and_only_with_sequence_parallelism():
    change = tensor_overlap(lambda at: at.tensor_size)
    before, after = layer(measurement()), layer(change(measurement(), LAYER, 1.0))
    assert before.forward_us - after.forward_us == pytest.approx(90 * 3 / 4)
    assert before.backward_us - after.backward_us == pytest.approx(90 * 3 / 4)
    assert layer(change(measurement(), LAYER, 0.0)) == before
    assert change(measurement(MeasuredAt(tensor_size=4)), LAYER, 1.0) is None
    assert change(measurement(MeasuredAt()), LAYER, 1.0) is None
    assert change(measurement(), {}, 1.0) is None


def test_expert_overlap_separates_exchanges_from_computation_and_drops_whole_layer_recompute():
    before, after = layer(measurement()), layer(expert_overlap(measurement(), LAYER, 0.5))
    assert (after.forward_us, after.backward_us) == (before.forward_us, before.backward_us)
    assert (after.forward_exchange_us, after.backward_exchange_us) == (120, 120)
    assert set(after.recompute) == {"none", "selective"}
    without = {key: replace(shown, exchange_us=0.0) for key, shown in LAYER.items()}
    assert expert_overlap(measurement(), without, 1.0) is None


def test_offload_keeps_less_and_shows_the_share_of_the_copy_not_counted_on():
    offload = Offload(moved_bytes=10 * MIB, freed_bytes=8 * MIB)
    change = activation_offload(lambda at: offload, host_bytes_per_s=10 * MIB / 1e-3)  # a copy of 1 ms
    before, after = layer(measurement()), layer(change(measurement(), {}, 0.75))
    assert after.forward_us - before.forward_us == pytest.approx(250)
    assert set(after.recompute) == {"none"}
    kept, plain = after.recompute["none"], before.recompute["none"]
    assert plain.saved_bytes - kept.saved_bytes == 8 * MIB
    assert kept.forward_peak_bytes - plain.forward_peak_bytes == 8 * MIB
    assert kept.backward_peak_bytes - plain.backward_peak_bytes == 16 * MIB


def test_offload_is_left_out_where_a_copy_is_longer_than_a_forward():
    offload = Offload(moved_bytes=10 * MIB, freed_bytes=8 * MIB)
    assert activation_offload(lambda at: offload, host_bytes_per_s=10 * MIB / 1.0)(measurement(), {}, 1.0) is None
    nothing = Offload(moved_bytes=0, freed_bytes=0)
    assert activation_offload(lambda at: nothing, host_bytes_per_s=1e12)(measurement(), {}, 1.0) is None


def test_families_are_combinations_at_points_where_they_differ():
    plain = variant(tensor=(1, 2), batches=(1,))
    variants = with_switches([plain], [[OVERLAP], [PAIRS]], [ZERO3], parts(plain))
    assert [item.modelled for item in variants] == [("pairs",), ("overlap",), ("overlap", "pairs"), ("ZeRO-3",)]
    overlap = variants[1]
    assert [found.at.tensor_size for found in overlap.profile.measurements] == [2]
    assert overlap.settings == {"own": 1, "tp_comm_overlap": True}
    assert variants[3].environment == {"CUDA_DEVICE_MAX_CONNECTIONS": ""}
    low, high = (layer(side.measurements[0]).forward_us for side in overlap.interval)
    counted = layer(overlap.profile.measurements[0]).forward_us
    assert counted == pytest.approx((low + high) / 2)
    assert low < counted < high


def layouts(item, num_devices=8):
    space = enumerate_space([item], Cluster(num_nodes=1, devices_per_node=num_devices), 64, DIMENSIONS)
    return [configuration.layout for configuration in space.configurations]


def test_layouts_of_a_switch_are_those_megatron_runs_it_in():
    plain = variant(tensor=(1, 2), batches=(1,), experts=(1, 2))
    pairs, _, _, zero = with_switches([plain], [[OVERLAP], [PAIRS]], [ZERO3], parts(plain))
    assert {(layout.pipeline_size > 1, layout.virtual_size > 1) for layout in layouts(pairs)} == {
        (False, False),
        (True, True),
    }
    assert all(layout.paired and layout.expert_size == 2 for layout in layouts(pairs))
    assert {layout.pipeline_size for layout in layouts(zero)} == {1}
    assert {layout.sharding.communication_unit for layout in layouts(zero)} == {4 * 10**8, 2 * 10**8}
    assert not layouts(zero, 1)


def test_pairs_save_half_of_what_they_hide_and_hold_a_microbatch_and_a_layer():
    plain = variant(tensor=(1,), batches=(1,), experts=(2,), num_layers=4)
    (pairs,) = with_switches([plain], [[PAIRS]], [], parts(plain))
    steps, peaks = {}, {}
    for item in (plain, pairs):
        space = enumerate_space([item], Cluster(num_nodes=1, devices_per_node=2), 32, Dimensions(virtual_sizes=(1,)))
        (found,) = search(space, DIMENSIONS, 1).top
        steps[item.modelled], peaks[item.modelled] = found.step_us, found.peak_bytes
    # 16 microbatches of 4 layers, each half of 120 us twice; the first forward and the last backward run alone.
    assert steps[()] - steps[("pairs",)] == pytest.approx(15 * 4 * 120)
    # A whole microbatch waits (its output layer is through), while the other one is at its last layer.
    alone, pair = 4 + 0.1 + 0.8, (4 + 0.1) + (1 + 0.1)
    assert peaks[("pairs",)] - peaks[()] == pytest.approx((pair - alone) * 300 * MIB, rel=0.01)


def test_the_fastest_measured_ones_stay_in_the_list_beside_modelled_ones_and_nothing_is_missed():
    plain = variant(tensor=(1, 2, 4), batches=(1, 2), num_layers=8)
    variants = [plain, *with_switches([plain], [[OVERLAP]], [ZERO3], parts(plain))]
    space = enumerate_space(variants, CLUSTER, 32, DIMENSIONS)
    top = ranked(space, DIMENSIONS, 3).top
    measured = enumerate_space([plain], CLUSTER, 32, DIMENSIONS)
    assert {found.step_us for found in search(measured, DIMENSIONS, 3).top} <= {found.step_us for found in top}
    assert [found.step_us for found in top] == sorted(found.step_us for found in top)
    modelled = replace(space, configurations=[item for item in space.configurations if item.variant.modelled])
    best = search(modelled, DIMENSIONS, 1).top[0]
    if best.step_us < sorted(found.step_us for found in top if not found.configuration.variant.modelled)[-1]:
        assert best.step_us in {found.step_us for found in top}


def test_a_model_that_only_fits_with_a_modelled_switch_gets_it():
    plain = variant(tensor=(1,), batches=(1,), capacity_mib=22_000, num_layers=16)
    cluster, dimensions = Cluster(num_nodes=1, devices_per_node=8), Dimensions(virtual_sizes=(1,), recompute=("none",))
    space = enumerate_space([plain], cluster, 8, dimensions)
    only = [item for item in space.configurations if item.layout.pipeline_size == 1]
    space.configurations = only
    with pytest.raises(InfeasiblePlan):
        ranked(space, dimensions, 3)
    variants = with_switches([plain], [], [ZERO3], {})
    space.configurations = only + enumerate_space(variants, cluster, 8, dimensions).configurations
    (found,) = ranked(space, dimensions, 3).top
    assert found.configuration.layout.sharding.parameters


def test_a_switch_that_no_measured_point_can_have_makes_no_family():
    plain = variant(tensor=(1,))
    assert with_switches([plain], [[OVERLAP]], [], parts(plain)) == []

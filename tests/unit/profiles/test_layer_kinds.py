"""Layers of several kinds in one module: which lie where, and the mean layer."""

from dataclasses import replace

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import MeasuredAt, ModuleCost, Profile, layer_block, mean_layer
from mindspeed_autoparallel.spec import to_json

PROFILE = language_profile(num_layers=5, tensor=(1,), batches=(1, 4))
PLAIN = PROFILE.at(MeasuredAt()).modules["text_decoder"]


def larger(layer, factor):
    dense = replace(layer.dense, parameter_bytes=factor * layer.dense.parameter_bytes)
    kinds = {
        kind: replace(
            cost, saved_bytes=factor * cost.saved_bytes, backward_peak_bytes=factor * cost.backward_peak_bytes
        )
        for kind, cost in layer.recompute.items()
    }
    return replace(layer, forward_us=factor * layer.forward_us, recompute=kinds, dense=dense)


def mixed(module, pattern=(0, 0, 1, 1, 1)):
    kinds = (module.layer, larger(module.layer, 3))
    return replace(module, layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)


def test_runs_are_equal_layers_in_a_row():
    module = mixed(PLAIN)
    first, second = module.kinds
    assert module.runs(0, 5) == [(first, 2), (second, 3)]
    assert module.runs(1, 2) == [(first, 1), (second, 1)]
    assert module.runs(3, 0) == []
    assert PLAIN.runs(1, 3) == [(PLAIN.layer, 3)]


def test_the_mean_layer_times_their_number_is_all_of_them_and_its_transient_the_worst():
    module = mixed(PLAIN)
    assert 5 * module.layer.forward_us == pytest.approx(sum(n * cost.forward_us for cost, n in module.runs(0, 5)))
    assert module.layer.dense.parameter_bytes == pytest.approx(2.2 * PLAIN.layer.dense.parameter_bytes, abs=1)
    assert module.layer.recompute["none"].saved_bytes == pytest.approx(
        2.2 * PLAIN.layer.recompute["none"].saved_bytes, abs=1
    )
    assert module.layer.recompute["full"].backward_peak_bytes == 3 * PLAIN.layer.recompute["full"].backward_peak_bytes


def test_changing_layers_changes_every_kind_by_its_block_and_the_mean_with_them():
    changed = mixed(PLAIN).with_layers(
        lambda block, cost: replace(cost, forward_us=1.0 if block == layer_block(0) else 6.0)
    )
    assert [cost.forward_us for cost in changed.kinds] == [1.0, 6.0]
    assert changed.layer.forward_us == pytest.approx(4.0)
    assert PLAIN.with_layers(lambda block, cost: replace(cost, forward_us=9.0)).layer.forward_us == 9.0


def test_kinds_of_layers_survive_the_file_and_are_interpolated_separately():
    measurements = tuple(
        replace(item, modules={name: mixed(module) for name, module in item.modules.items()})
        for item in PROFILE.measurements
    )
    profile = replace(PROFILE, measurements=measurements)
    again = Profile.parse(to_json(profile))
    assert again.measurements == profile.measurements
    between = profile.at(MeasuredAt(micro_batch_size=2)).modules["text_decoder"]
    low, high = (item.modules["text_decoder"] for item in measurements)
    assert between.pattern == low.pattern
    for kind in range(2):
        assert low.kinds[kind].forward_us < between.kinds[kind].forward_us < high.kinds[kind].forward_us


@pytest.mark.parametrize("pattern", [(), (0, 2), (-1, 0)])
def test_a_pattern_that_names_no_kind_is_refused(pattern):
    with pytest.raises(ProfileError, match="pattern"):
        ModuleCost(layer=PLAIN.layer, kinds=(PLAIN.layer, PLAIN.layer), pattern=pattern)


def test_a_pattern_of_another_length_than_the_model_is_refused():
    measurements = tuple(
        replace(item, modules={name: mixed(module, (0, 0, 1, 1)) for name, module in item.modules.items()})
        for item in PROFILE.measurements
    )
    with pytest.raises(ProfileError, match="4 layers, the model 5"):
        replace(PROFILE, measurements=measurements)

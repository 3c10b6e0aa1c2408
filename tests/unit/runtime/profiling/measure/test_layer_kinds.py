"""Which layers stand for all, and what is left of arguments that list a choice per layer."""

import argparse

import pytest

from mindspeed_autoparallel.runtime.profiling.measure.structure import choices_by_layer, fewest_layers, shorten


@pytest.mark.parametrize(
    ("kinds", "number"), [((0,) * 8, 2), ((0, 1, 0, 1), 2), ((0, 0, 0, 1, 1, 1), 4), ((0, 1, 1, 2), 4), ((0,), 2)]
)
def test_the_shortest_beginning_shows_every_kind_and_has_two_layers(kinds, number):
    assert fewest_layers(kinds) == number


def test_lists_of_choices_per_layer_are_cut_with_the_layers():
    arguments = argparse.Namespace(num_layers=6, moe_layer_freq=[0, 1, 1, 1, 1, 1], window_attn_skip_freq=3)
    shorten(arguments, 2)
    assert (arguments.num_layers, arguments.moe_layer_freq, arguments.window_attn_skip_freq) == (2, [0, 1], 3)
    assert not hasattr(arguments, "linear_attention_freq")


def test_a_shortened_model_is_made_longer_again_from_the_whole_lists():
    arguments = argparse.Namespace(num_layers=6, moe_layer_freq=[0, 1, 1, 1, 0, 1])
    whole = choices_by_layer(arguments)
    shorten(arguments, 2)
    shorten(arguments, 4, whole)
    assert (arguments.num_layers, arguments.moe_layer_freq) == (4, [0, 1, 1, 1])

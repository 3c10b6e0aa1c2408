"""Which splits a host runs, by its release and script."""

import argparse
import itertools

import pytest

from mindspeed_autoparallel.runtime.megatron.description import describe
from mindspeed_autoparallel.runtime.megatron.splits import runnable_splits
from mindspeed_autoparallel.spec import Layout


def splits(**arguments):
    arguments = argparse.Namespace(**arguments)
    return runnable_splits(arguments, describe(arguments))


def test_a_release_with_layout_strings_runs_any_split():
    assert splits(num_layers=8, pipeline_model_parallel_layout=None) is None


@pytest.mark.parametrize(("layers", "stages"), [(6, 1), (6, 2), (7, 3), (9, 4)])
def test_without_layout_strings_all_stages_but_the_first_and_last_are_alike(layers, stages):
    listed = [
        found["text_decoder"]
        for found in splits(num_layers=layers).of_layout(Layout(pipeline_size=stages, data_size=1))
    ]
    every = itertools.product(range(1, layers + 1), repeat=stages)
    assert sorted(listed) == sorted(row for row in every if sum(row) == layers and len(set(row[1:-1])) <= 1)


def test_interleaved_stages_are_even_but_for_the_ends_or_alike_on_a_rank():
    layout = Layout(pipeline_size=2, virtual_size=2, schedule="interleaved")

    def rows(layers):
        return [found["text_decoder"] for found in splits(num_layers=layers).of_layout(layout)]

    assert rows(8) == [(2, 2, 2, 2), (1, 3, 1, 3), (3, 1, 3, 1)]
    assert rows(6) == [(1, 2, 2, 1), (1, 2, 1, 2), (2, 1, 2, 1)]
    assert rows(7) == [(2, 2, 2, 1), (1, 2, 2, 2)]
    assert rows(5) == []


def test_the_vision_model_of_megatrons_script_stays_on_the_first_stage():
    found = splits(num_layers=4, freeze_ViT=False, freeze_LM=False, pipeline_model_parallel_layout=None)
    assert list(found.of_layout(Layout(pipeline_size=2))) == [{"vision_model": (4, 0), "language_model": (2, 2)}]
    assert list(found.of_layout(Layout(pipeline_size=3))) == []
    assert not found.recompute_by_stage

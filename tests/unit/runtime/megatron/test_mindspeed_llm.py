"""Splits in MindSpeed-LLM's words, read back as its features read them."""

import argparse
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.runtime.megatron.mindspeed import (
    check_expert_size,
    check_list_was_given,
    least_expert_sizes,
    split_arguments,
    takes_layout_strings,
)
from mindspeed_autoparallel.spec.layout import Layout


def layers_read(said, num_layers, pipeline_size, virtual_size):
    """Layers that do something by virtual stage, as the host deals them out."""
    if listed := said.get("num_layer_list"):
        return [int(word) for word in listed.split(",")]
    total = said.get("num_layers", num_layers)
    size, empty = total // (pipeline_size * virtual_size), set()
    if words := said.get("noop_layers"):
        empty = {int(word) for word in words.split(",")}
    return [sum(layer not in empty for layer in range(first, first + size)) for first in range(0, total, size)]


@given(st.integers(1, 4), st.sampled_from([1, 2, 3]), st.data())
def test_the_host_reads_back_the_layers_of_every_stage(pipeline_size, virtual_size, data):
    stages = pipeline_size * virtual_size
    counts = data.draw(st.lists(st.integers(1, 9), min_size=stages, max_size=stages))
    said = split_arguments(counts, virtual_size)
    assert layers_read(said, sum(counts), pipeline_size, virtual_size) == counts
    assert not (said.get("num_layer_list") and said.get("num_layers_per_virtual_pipeline_stage")), "refused together"


def test_an_even_split_needs_no_words():
    assert split_arguments([4, 4], 1) == {}
    assert split_arguments([2, 2, 2, 2], 2) == {"num_layers_per_virtual_pipeline_stage": 2}


def test_a_list_that_the_command_line_lacks_is_requested():
    said = split_arguments([1, 3], 1)
    check_list_was_given(said, SimpleNamespace(num_layer_list="1,3"), Path("plan.json"))
    with pytest.raises(PlanError, match=r"\(given: 2,2\)\. Add --num-layer-list 1,3 to the script's flags"):
        check_list_was_given(said, SimpleNamespace(num_layer_list="2,2"), Path("plan.json"))
    check_list_was_given({}, SimpleNamespace(), Path("plan.json"))


@pytest.mark.parametrize(
    ("manager", "given", "expected"),
    [
        (SimpleNamespace(PipelineModelParallelLayoutFeature=object), None, False),
        (SimpleNamespace(PipelineModelParallelLayoutFeature=object), "Et|tL", True),
        (SimpleNamespace(), None, True),
        (None, None, True),
    ],
)
def test_layout_strings_that_mindspeed_installs_by_the_command_line_are_not_set_by_a_plan(
    monkeypatch, manager, given, expected
):
    """Its master ended in Megatron's assertion of an even split under VPP3."""
    if manager is not None:
        monkeypatch.setitem(sys.modules, "mindspeed.features_manager", manager)
    arguments = argparse.Namespace(pipeline_model_parallel_layout=given, num_layer_list=None, noop_layers=None)
    assert takes_layout_strings(arguments) == expected
    assert not takes_layout_strings(argparse.Namespace())


@pytest.mark.parametrize("newer", [False, True])
def test_mindspeeds_own_check_names_the_expert_ranks_that_its_overlap_needs(monkeypatch, newer):
    """From 26.1 on it asserts two or more beside --moe-alltoall-overlap-comm; master's MiniMax test ended in that."""

    class Feature:
        def validate_args(self, args):
            print("Warning: with `alltoall` dispatcher")
            if newer and args.expert_model_parallel_size == 1:
                raise AssertionError("only support with `--expert-model-parallel-size` > 1.")
            if args.tensor_model_parallel_size > 1:
                raise AssertionError("needs `moe_tp_extend_ep`.")

    name = "mindspeed.features_manager.moe.moe_alltoall_overlap"
    arguments = argparse.Namespace(moe_alltoall_overlap_comm=True, tensor_model_parallel_size=2)
    assert least_expert_sizes(arguments) == {}
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(MoEAlltoAllOverLapFeature=Feature))
    assert least_expert_sizes(arguments) == ({"--moe-alltoall-overlap-comm": 2} if newer else {})
    assert least_expert_sizes(argparse.Namespace(moe_alltoall_overlap_comm=False)) == {}
    layout = Layout(pipeline_size=1, tensor_size=1, data_size=2, micro_batch_size=1)
    if newer:
        with pytest.raises(PlanError, match="size 1, and --moe-alltoall-overlap-comm needs 2 or more"):
            check_expert_size(arguments, layout, Path("plan.json"))
    else:
        check_expert_size(arguments, layout, Path("plan.json"))

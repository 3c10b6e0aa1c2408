"""The script's own configuration is found among the searched ones, or the reason is given."""

import argparse

import pytest
from language_profile import language_profile

from mindspeed_autoparallel.planner.tuner.candidates import Dimensions, ProfileVariant, enumerate_space
from mindspeed_autoparallel.planner.tuner.search import search
from mindspeed_autoparallel.runtime.features.auto_tuning.user_baseline import described, user_baseline
from mindspeed_autoparallel.spec import Cluster

CLUSTER, BATCH = Cluster(num_nodes=1, devices_per_node=8), 64


def space_of(**changes):
    variant = ProfileVariant(name="", settings={}, profile=language_profile(**changes))
    return enumerate_space([variant], CLUSTER, BATCH, Dimensions())


def given(space, **flags):
    arguments = argparse.Namespace(num_layers=32, micro_batch_size=1, use_distributed_optimizer=True, **flags)
    return user_baseline(arguments, space, CLUSTER, BATCH)


def test_the_flags_are_priced_as_the_search_prices_them():
    space = space_of()
    best = search(space, Dimensions(), 1).top[0]
    layout = best.configuration.layout
    assert best.placement.layers["text_decoder"] == (32 // layout.num_virtual_stages,) * layout.num_virtual_stages
    flags = {
        "tensor_model_parallel_size": layout.tensor_size,
        "pipeline_model_parallel_size": layout.pipeline_size,
        "sequence_parallel": layout.sequence_parallel,
        "micro_batch_size": layout.micro_batch_size,
        "use_distributed_optimizer": layout.distributed_optimizer,
        "num_layers": 32,
        "num_virtual_stages_per_pipeline_rank": layout.virtual_size if layout.virtual_size > 1 else None,
        "overlap_grad_reduce": layout.overlap_gradient_reduce,
        "overlap_param_gather": layout.overlap_parameter_gather,
    }
    own = user_baseline(argparse.Namespace(**flags), space, CLUSTER, BATCH)
    assert own.step_us == pytest.approx(best.step_us)
    assert described(own)["fits"]


def test_stages_chunks_and_recompute_of_the_script_are_those_of_its_flags():
    space = space_of()
    plain = given(space, pipeline_model_parallel_size=4)
    assert plain.placement.layers == {"text_decoder": (8, 8, 8, 8)}
    chunks = given(space, pipeline_model_parallel_size=4, num_layers_per_virtual_pipeline_stage=4)
    assert chunks.configuration.layout.virtual_size == 2
    whole = given(
        space,
        pipeline_model_parallel_size=4,
        recompute_granularity="full",
        recompute_method="block",
        recompute_num_layers=3,
    )
    assert whole.placement.recompute == {"text_decoder": {"full": (3, 3, 3, 3)}}
    assert whole.step_us > plain.step_us
    assert whole.peak_bytes < plain.peak_bytes
    every = given(
        space,
        pipeline_model_parallel_size=4,
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
    )
    assert every.placement.recompute == {"text_decoder": {"full": (8, 8, 8, 8)}}
    assert described(every)["label"].endswith(", recompute full")


def test_a_configuration_that_does_not_fit_is_reported_with_its_figures():
    told = described(given(space_of(capacity_mib=3000)))
    assert not told["fits"]
    assert told["peak_bytes"] > told["limit_bytes"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"tensor_model_parallel_size": 3}, "its TP 3 x PP 1 x CP 1 does not divide 8 devices"),
        (
            {"microbatch_group_size_per_vp_stage": 4},
            "its microbatches are grouped by --microbatch-group-size-per-virtual-pipeline-stage",
        ),
        ({"pipeline_model_parallel_layout": "Et|tL"}, "its stages are cut by --pipeline-model-parallel-layout"),
        ({"pipeline_model_parallel_size": 8, "num_virtual_stages_per_pipeline_rank": 3}, "32 layers do not divide"),
        ({"context_parallel_size": 2}, "is not among the layouts searched"),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, "its recompute was not traced"),
    ],
)
def test_a_script_that_cannot_be_compared_has_a_reason(flags, reason):
    assert reason in described(given(space_of(), **flags))["reason"]

"""Flags that a configuration decides replace the user's; everything else stays as it was typed."""

import argparse
from types import SimpleNamespace

import pytest

from mindspeed_autoparallel.runtime.features.auto_tuning.argv import (
    flags_to_remove,
    launcher_words,
    values_of,
    with_configuration,
    words_of,
)
from mindspeed_autoparallel.runtime.megatron.layout_arguments import recompute_arguments
from mindspeed_autoparallel.spec import Cluster, Layout

USER = [
    "pretrain_gpt.py",
    "--num-layers",
    "4",
    "--tensor-model-parallel-size",
    "8",
    "--sequence-parallel",
    "--bf16",
    "--micro-batch-size=4",
    "--recompute-granularity",
    "full",
    "--auto-tuning",
    "--auto-tuning-ranks",
    "16",
    "--nnodes",
    "2",
    "--node-rank",
    "0",
    "--data-path",
    "1.0",
    "a",
    "b",
]


def test_tuned_flags_replace_the_users_and_the_rest_stays():
    words = words_of({"tensor_model_parallel_size": 2, "micro_batch_size": 1, "sequence_parallel": False})
    command = with_configuration(USER, words)
    assert command == [
        "pretrain_gpt.py",
        "--num-layers",
        "4",
        "--bf16",
        "--data-path",
        "1.0",
        "a",
        "b",
        "--tensor-model-parallel-size",
        "2",
        "--micro-batch-size",
        "1",
    ]


def test_switches_and_defaults_are_written_as_megatron_reads_them():
    words = words_of(
        {
            "tensor_model_parallel_size": 1,
            "context_parallel_size": 1,
            "sequence_parallel": True,
            "overlap_grad_reduce": False,
            "recompute_num_layers": 1,
            "recompute_granularity": None,
        }
    )
    assert words == ["--tensor-model-parallel-size", "1", "--sequence-parallel", "--recompute-num-layers", "1"]


def test_a_recompute_kind_becomes_megatrons_flags_and_replaces_the_users():
    assert words_of(recompute_arguments("selective:layernorm,mlp", 0)) == [
        "--recompute-granularity",
        "selective",
        "--recompute-modules",
        "layernorm",
        "mlp",
    ]
    assert words_of(recompute_arguments("full", 3))[2:] == [
        "--recompute-method",
        "block",
        "--recompute-num-layers",
        "3",
    ]
    assert words_of(recompute_arguments("full:4", 9))[2:] == [
        "--recompute-method",
        "uniform",
        "--recompute-num-layers",
        "4",
    ]
    assert recompute_arguments("full")["recompute_method"] == "uniform"
    assert recompute_arguments("none", 0) == {}
    user = ["train.py", "--recompute-activations", "--recompute-modules", "mlp", "moe", "--bf16"]
    assert with_configuration(user, []) == ["train.py", "--bf16"]


def test_words_that_stay_in_force_beside_the_pasted_ones_are_named():
    words = words_of({"tensor_model_parallel_size": 2, "micro_batch_size": 1, "sequence_parallel": False})
    assert flags_to_remove(USER, words) == ["--sequence-parallel", "--recompute-granularity", "full"]
    underscored = ["train.py", "--use_distributed_optimizer", "--context_parallel_size=2", "--micro_batch_size", "4"]
    assert flags_to_remove(underscored, words) == ["--use_distributed_optimizer", "--context_parallel_size=2"]
    assert with_configuration(underscored, words) == ["train.py", *words]


def test_the_launcher_starts_all_devices_of_the_cluster():
    one = launcher_words(Cluster(num_nodes=1, devices_per_node=4), "localhost", 6005)
    assert one == ["torchrun", "--standalone", "--nproc-per-node", "4"]
    two = launcher_words(Cluster(num_nodes=2, devices_per_node=8), "node0", 6005)
    assert two == [
        "torchrun",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "8",
        "--node-rank",
        "0",
        "--master-addr",
        "node0",
        "--master-port",
        "6005",
    ]


OWN = {
    "moe_token_dispatcher_type": ("--moe-token-dispatcher-type", "alltoall"),
    "overlap_grad_reduce": ("--overlap-grad-reduce",),
    "overlap_param_gather": ("--overlap-param-gather",),
    "recompute_granularity": ("--recompute-granularity", "selective"),
    "use_distributed_optimizer": ("--use-distributed-optimizer",),
    "micro_batch_size": ("--micro-batch-size", "4"),
}
"""Of the script, for what tuning handles."""
LAYOUTS = [
    {"tensor_size": 2, "sequence_parallel": True, "expert_size": 2, "data_size": 2},
    {"tensor_size": 2, "sequence_parallel": True, "expert_tensor_size": 1, "data_size": 4, "expert_size": 4},
    {"pipeline_size": 2, "virtual_size": 2, "schedule": "interleaved", "overlap_gradient_reduce": True},
    {"overlap_gradient_reduce": True, "overlap_parameter_gather": True, "data_size": 2},
    {"context_size": 2, "distributed_optimizer": False},
]


@pytest.mark.megatron
@pytest.mark.parametrize("settings", [{}, {"moe_token_dispatcher_type": "allgather"}])
@pytest.mark.parametrize("num_experts", [0, 8])
@pytest.mark.parametrize("sizes", LAYOUTS, ids=str)
def test_the_launched_values_are_the_predicted_ones(sizes, num_experts, settings):
    """Megatron's own parser reads back the priced values, with any other flags in the script."""
    arguments_module = pytest.importorskip("megatron.training.arguments")
    own = ["train.py", *(word for words in OWN.values() for word in words)]
    parser = arguments_module.add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False))
    given = parser.parse_args(own[1:])
    layout = Layout(**sizes)
    module = SimpleNamespace(name="decoder", num_experts=num_experts)
    plan = SimpleNamespace(
        layout=layout,
        model=SimpleNamespace(modules=[module]),
        global_batch_size=16,
        layers_of=lambda name: [2] * layout.pipeline_size * layout.virtual_size,
    )
    values = values_of(plan, settings, "full", 2, given)
    read = parser.parse_args(with_configuration(own, words_of(values))[1:])
    different = {
        name: (value, getattr(read, name))
        for name, value in values.items()
        if (getattr(read, name) or False) != (value or False)
    }
    assert different == {}
    dispatcher = settings.get("moe_token_dispatcher_type", "alltoall")
    assert read.moe_token_dispatcher_type == dispatcher or not (num_experts or settings)

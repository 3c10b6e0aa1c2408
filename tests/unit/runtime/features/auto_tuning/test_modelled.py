"""Which modelled switches are offered on which device and software, with what flags, and why not the others."""

import argparse
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.planner.tuner.modelled import ExposedParts
from mindspeed_autoparallel.planner.tuner.pricing import Prices
from mindspeed_autoparallel.profiles import Collective, LinkTier, MeasuredAt
from mindspeed_autoparallel.profiles.knowledge import Operator, Signature
from mindspeed_autoparallel.profiles.knowledge.estimate import Estimate
from mindspeed_autoparallel.profiles.records import BlockTrace, json_of, record_of
from mindspeed_autoparallel.runtime.features.auto_tuning.argv import (
    environment_words,
    sharding_values,
    with_configuration,
    with_environment,
    words_of,
)
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.modelled import Target, modelled_switches
from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.variants import SearchContext
from mindspeed_autoparallel.runtime.features.auto_tuning.request import TuningRequest
from mindspeed_autoparallel.runtime.features.auto_tuning.switching import exposed_parts
from mindspeed_autoparallel.spec import Layout, Sharding

NEWEST = {
    "use_megatron_fsdp": False,
    "ckpt_format": "torch_dist",
    "suggested_communication_unit_size": None,
    "megatron_fsdp_main_grads_dtype": "auto",
    "optimizer": "adam",
    "tp_comm_overlap": False,
    "bf16": True,
    "fp16": False,
    "overlap_moe_expert_parallel_comm": False,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_topk": 2,
    "fine_grained_activation_offloading": False,
    "offload_modules": [],
    "transformer_impl": "transformer_engine",
    "hidden_size": 4096,
    "kv_channels": None,
    "swiglu": True,
    "moe_ffn_hidden_size": 1024,
    "cuda_graph_impl": "none",
}
"""What the newest parser has; ``cuda`` users' usual values."""
H100 = Target(device=find_device("H100"), installed=lambda package: True)
ASCEND = Target(device=replace(find_device("910B"), host_link_gb_per_s=25.0), installed=lambda package: True)


def request_of(**changes):
    values = {
        "description": None,
        "num_ranks": 16,
        "num_nodes": 2,
        "num_processes_per_node": 8,
        "node_rank": 0,
        "master_addr": "localhost",
        "master_port": 6000,
        "global_batch_size": 64,
        "micro_batch_size": 1,
        "sequence_length": 4096,
        "num_layers": 8,
        "num_heads": 32,
        "num_query_groups": 8,
        "ffn_hidden_size": 11008,
        "num_experts": 0,
        "context_size": 1,
        "work_dir": Path(),
        "knowledge_file": Path(),
        "memory_limit_bytes": None,
        "launch_timeout_s": 60.0,
        "verify": False,
        "calibration_file": None,
        "log_level": "info",
        "target_device": None,
    }
    return TuningRequest(**{**values, **changes})


def asked(device="cuda", experts=0, without=(), **changes):
    values = {key: value for key, value in {**NEWEST, **changes}.items() if key not in without}
    return SearchContext(
        request=request_of(num_experts=experts), arguments=argparse.Namespace(**values), device_name=device
    )


def offered(question, target=H100):
    found = modelled_switches(question, target)
    return {switch.title: switch for group in (*found.groups, found.alone) for switch in group}


def test_a_gpu_with_everything_installed_is_offered_everything():
    dense, experts = offered(asked()), offered(asked(experts=8))
    assert list(dense) == [
        "tensor-parallel overlap",
        "activation offload (core_attn, attn_proj)",
        "ZeRO-2 (Megatron FSDP)",
        "ZeRO-3 (Megatron FSDP)",
    ]
    assert {"MoE all-to-all overlap", "flex dispatcher (DeepEP)", "activation offload (expert_fc1, moe_act)"} <= set(
        experts
    )
    assert "tensor-parallel overlap" not in experts


def test_an_npu_is_offered_what_mindspeed_has():
    question = asked("npu", use_ascend_mc2=False, swap_attention=False)
    found = offered(question, ASCEND)
    assert {title: dict(switch.settings) for title, switch in found.items()} == {
        "MC2": {"use_ascend_mc2": True},
        "swap of attention's activations": {"swap_attention": True},
    }
    assert question.left_out["ZeRO-2/3 (Megatron FSDP)"] == "needs NVIDIA GPUs"


def test_the_cpu_gets_no_modelled_switch_and_the_reason():
    question = asked("cpu", experts=8)
    assert not offered(question)
    assert set(question.left_out) == {
        "tensor-parallel overlap",
        "MoE all-to-all overlap",
        "flex dispatcher (DeepEP)",
        "activation offload",
        "ZeRO-2/3 (Megatron FSDP)",
    }


def _without(package):
    return replace(H100, installed=lambda name: name != package)


@pytest.mark.parametrize(
    ("question", "target", "title", "words"),
    [
        (asked(without=["use_megatron_fsdp"]), H100, "ZeRO-2/3 (Megatron FSDP)", "0.14 and newer"),
        (asked(), _without("einops"), "ZeRO-2/3 (Megatron FSDP)", "einops, which is not installed"),
        (asked(optimizer="muon"), H100, "ZeRO-2/3 (Megatron FSDP)", "no muon optimizer"),
        (asked(use_megatron_fsdp=True), H100, "ZeRO-2/3 (Megatron FSDP)", "the script sets --use-megatron-fsdp"),
        (asked(), _without("transformer_engine"), "tensor-parallel overlap", "Transformer Engine, which is not"),
        (asked(transformer_impl="local"), H100, "activation offload", "--transformer-impl transformer_engine"),
        (asked(without=["fine_grained_activation_offloading"]), H100, "activation offload", "0.16 and newer"),
        (asked(multi_latent_attention=True), H100, "activation offload", "multi-latent"),
        (asked(cuda_graph_impl="local"), H100, "activation offload", "CUDA graphs"),
        (asked(), replace(H100, device=None), "activation offload", "host_link_gb_per_s"),
        (asked(experts=8), H100, "tensor-parallel overlap", "experts"),
        (asked(experts=8, bf16=False), H100, "MoE all-to-all overlap", "bf16 and fp16 only"),
        (
            asked(experts=8, moe_shared_expert_overlap=True),
            H100,
            "MoE all-to-all overlap",
            "--moe-shared-expert-overlap",
        ),
        (asked(experts=8, mtp_num_layers=2), H100, "MoE all-to-all overlap", "more than one MTP layer"),
        (asked(experts=8), _without("deep_ep"), "flex dispatcher (DeepEP)", "which is not installed here"),
        (asked("npu"), ASCEND, "tensor-parallel overlap", "--use-ascend-mc2 (MindSpeed has it)"),
        (
            asked("npu", swap_attention=False),
            replace(ASCEND, device=find_device("910B")),
            "activation offload",
            "host_link",
        ),
    ],
)
def test_the_reason_names_what_is_missing(question, target, title, words):
    assert title not in {name.split(" (core")[0] for name in offered(question, target)}
    assert words in question.left_out[title]


def test_offload_moves_the_bytes_of_the_scripts_own_sizes():
    switch = offered(asked())["activation offload (core_attn, attn_proj)"]
    (moved,) = {cell.cell_contents for cell in switch.change.__closure__ if callable(cell.cell_contents)}
    at = MeasuredAt(tensor_size=2, micro_batch_size=2)
    # 8192 tokens; 16 query heads of 128; 4 key heads of 128; bf16.
    query, key = 8192 * 16 * 128, 8192 * 4 * 128
    assert moved(at).freed_bytes == 2 * (2 * query + 2 * key)
    assert moved(at).moved_bytes == 2 * (3 * query + 2 * key)


def test_flags_of_sharded_state_are_megatrons_and_replace_the_users():
    switch = offered(asked())["ZeRO-3 (Megatron FSDP)"]
    layout = Layout(data_size=16, sharding=Sharding(parameters=True, communication_unit=1234))
    words = words_of({**switch.settings, **sharding_values(layout)})
    assert words == [
        "--use-megatron-fsdp",
        "--no-gradient-accumulation-fusion",
        "--ckpt-format",
        "fsdp_dtensor",
        "--megatron-fsdp-main-grads-dtype",
        "fp32",
        "--data-parallel-sharding-strategy",
        "optim_grads_params",
        "--suggested-communication-unit-size",
        "1234",
    ]
    command = with_configuration(["s.py", "--ckpt-format", "torch_dist", "--lr", "1"], words)
    assert command == ["s.py", "--lr", "1", *words]
    without = with_configuration(["s.py", "--use-megatron-fsdp", "--lr", "1"], [])
    assert without == ["s.py", "--lr", "1"]
    assert sharding_values(Layout()) == {}


def test_several_modules_are_words_of_one_flag():
    switch = offered(asked())["activation offload (core_attn, attn_proj)"]
    words = words_of(switch.settings)
    assert words == ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "attn_proj"]


def test_a_communication_unit_of_the_script_is_kept_and_megatrons_own_taken_where_there_is_no_flag():
    assert offered(asked(suggested_communication_unit_size=77))["ZeRO-3 (Megatron FSDP)"].communication_unit == 77
    assert offered(asked())["ZeRO-3 (Megatron FSDP)"].communication_unit is None
    old = asked(without=["suggested_communication_unit_size"])
    assert offered(old)["ZeRO-3 (Megatron FSDP)"].communication_unit == 10**9


def test_variables_stand_before_the_command_and_come_back_after_a_check(monkeypatch):
    needed = {"CUDA_DEVICE_MAX_CONNECTIONS": "", "NVTE_CPU_OFFLOAD_V1": "1"}
    assert environment_words(needed) == ["env", "-u", "CUDA_DEVICE_MAX_CONNECTIONS", "NVTE_CPU_OFFLOAD_V1=1"]
    assert environment_words({}) == []
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.delenv("NVTE_CPU_OFFLOAD_V1", raising=False)
    with pytest.raises(KeyError), with_environment(needed):
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in os.environ
        assert os.environ["NVTE_CPU_OFFLOAD_V1"] == "1"
        raise KeyError
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    assert "NVTE_CPU_OFFLOAD_V1" not in os.environ


class PricedAt(Prices):
    def operator(self, operator):
        return Estimate(time_us=float(operator.sizes[0]), relative_error=0.0, exact=True)


def test_parts_of_a_trace_are_separated_by_operator_and_group():
    tier = LinkTier(default=Collective(latency_us=0.0, bytes_per_s=1e6))
    prices = PricedAt(base=None, device="", software="", tiers={"intra": tier, "inter": tier}, devices_per_node=4)
    products = Operator(name="aten.mm.default", signature=Signature.of_json(""), sizes=(7,))
    others = Operator(name="aten.mul.Tensor", signature=Signature.of_json(""), sizes=(1000,))
    collectives = [
        {"name": "all_gather", "size_bytes": 8, "ranks": [0, 1], "count": 2},  # tensor ranks: 2 x 4 us
        {"name": "all_gather", "size_bytes": 8, "ranks": [0, 2], "count": 1},  # other ranks
        {"name": "all_reduce", "size_bytes": 8, "ranks": [0, 1], "count": 1},
        {"name": "all_to_all", "size_bytes": 8, "ranks": [0, 2], "count": 1},  # context ranks
        {"name": "all_to_all", "size_bytes": 8, "ranks": [0, 2, 4, 6], "count": 3},  # experts, on two nodes: 3 x 6 us
    ]
    calls = {"operators": [[0, 2.0], [1, 1.0]], "collectives": collectives, "num_calls": 8}
    values = {
        "operators": [json_of(products), json_of(others)],
        "modules": [{"name": "text", "calls": {"layer": {"forward": calls, "backward": calls}}}],
    }
    trace = record_of(values, "trace", BlockTrace)
    at = MeasuredAt(tensor_size=2, context_size=2, expert_size=4, sequence_parallel=True)
    shown = exposed_parts(trace, at, prices)["text", "layer", "forward"]
    assert shown == ExposedParts(tensor_us=8.0, product_us=14.0, exchange_us=18.0, num_destinations=2)

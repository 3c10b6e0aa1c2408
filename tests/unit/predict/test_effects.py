"""Every key of a request moves the prediction, or the answer names it: drawn requests, each key left out in turn."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.predict.predict import predict_one

_BASE: dict[str, dict[str, Any]] = {
    "model": {"num_layers": 16, "hidden": 2048, "heads": 16, "ffn": 6144, "seq": 4096, "vocab": 32000, "swiglu": True},
    "hw": {"gpu": "H100", "num_gpus": 64, "gpus_per_node": 8},
    "parallel": {"tp": 2, "pp": 2},
    "train": {"gbs": 256, "mbs": 1, "recompute": "none"},
}
_EXPERTS = {"type": "moe", "num_experts": 16, "topk": 4, "moe_ffn": 1024}
_MAMBA = {"type": "hybrid", "num_layers": 16, "layer_pattern": "M*M-M*M-" * 2}
_LINEAR = {"type": "hybrid", "num_layers": 16, "layer_pattern": "G*G-G*G-" * 2}
_LATENT = {"q_lora_rank": 512, "kv_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
_HEADS = {"num_key_heads": 8, "num_value_heads": 16}
_VALUES: dict[tuple[str, str], tuple[dict[str, dict[str, Any]], Any]] = {
    ("model", "kv_heads"): ({}, 4),
    ("model", "head_size"): ({}, 192),
    ("model", "tied_embeddings"): ({}, True),
    ("model", "causal"): ({}, False),
    ("model", "window"): ({}, 512),
    ("model", "windowed_share"): ({"model": {"window": 512}}, 0.5),
    ("model", "mla"): ({}, _LATENT),
    ("model", "mtp_layers"): ({}, 1),
    ("model", "qk_norm"): ({}, True),
    ("model", "post_norm"): ({}, True),
    ("model", "mean_seq"): ({}, 1536),
    ("model", "dsa"): ({}, {"topk": 512}),
    ("model", "activation"): ({}, "gelu_tanh"),
    ("model", "logit_softcap"): ({"train": {"cross_entropy_fusion": False}}, True),
    ("model", "shared_expert_ffn"): ({"model": _EXPERTS}, 2048),
    ("model", "expert_bias"): ({"model": _EXPERTS}, True),
    ("model", "expert_clamp"): ({"model": _EXPERTS}, True),
    ("model", "num_dense_layers"): ({"model": _EXPERTS}, 2),
    ("model", "moe_layer_freq"): ({"model": _EXPERTS}, 2),
    ("model", "capacity_factor"): ({"model": _EXPERTS}, 1.5),
    ("model", "dispatcher"): ({"model": _EXPERTS, "parallel": {"ep": 4}}, "allgather"),
    ("model", "mamba"): ({"model": _MAMBA}, {"num_heads": 32, "head_dim": 64, "state_dim": 256}),
    ("model", "linear_attention"): ({"model": _LINEAR}, _HEADS),
    ("hw", "inter_node_gbps"): ({"train": {"overlap_grad_reduce": False}}, 400),
    ("parallel", "cp"): ({}, 2),
    ("parallel", "cp_type"): ({"parallel": {"cp": 2}}, "a2a"),
    ("parallel", "ulysses_degree"): ({"parallel": {"cp": 4, "cp_type": "hybrid_cp_algo"}}, 2),
    ("parallel", "ep"): ({"model": _EXPERTS}, 4),
    ("parallel", "etp"): ({"model": _EXPERTS, "parallel": {"ep": 4}}, 1),
    ("parallel", "vpp"): ({}, 4),
    ("parallel", "layers_per_chunk"): ({}, 2),
    ("parallel", "microbatch_group_size"): ({"parallel": {"vpp": 4}}, 4),
    ("parallel", "sp"): ({}, False),
    ("parallel", "dist_opt"): ({}, False),
    ("parallel", "num_layer_list"): ({}, [6, 10]),
    ("parallel", "pipeline_layout"): ({}, "Et*5|t*11L"),
    ("parallel", "first_stage_layers"): ({}, 6),
    ("parallel", "last_stage_layers"): ({}, 6),
    ("parallel", "account_for_embedding"): ({"model": {"num_layers": 15}}, True),
    ("parallel", "account_for_loss"): ({}, True),
    ("parallel", "noop_layers"): ({}, [14, 15]),
    ("parallel", "tp_2d"): ({"parallel": {"tp": 4}}, {"x": 2, "y": 2}),
    ("parallel", "fsdp"): ({"parallel": {"pp": 1}}, 32),
    ("parallel", "sharding_strategy"): ({"parallel": {"pp": 1, "fsdp": 32}}, "optim_grads"),
    ("train", "recompute"): ({}, "full"),
    ("train", "precision"): ({}, "fp8"),
    ("train", "stack"): ({}, "megatron-2021"),
    ("train", "attention"): ({}, "unfused"),
    ("train", "cross_entropy_fusion"): ({}, False),
    ("train", "overlap_grad_reduce"): ({}, False),
    ("train", "tp_comm_overlap"): ({}, False),
    ("train", "moe_a2a_overlap"): ({"model": _EXPERTS, "parallel": {"ep": 4}}, True),
    ("train", "recompute_method"): ({"train": {"recompute": "full", "recompute_num_layers": 2}}, "block"),
    ("train", "recompute_num_layers"): ({"train": {"recompute": "full"}}, 2),
    ("train", "recompute_modules"): ({"train": {"recompute": "selective"}}, ["mlp"]),
    ("train", "recompute_per_pp_rank"): (
        {"parallel": {"vpp": 4}, "train": {"recompute": "full", "recompute_method": "block"}},
        True,
    ),
    ("train", "recompute_extra"): ({}, ["recompute-activation-function"]),
    ("train", "reuse_fp32_param"): ({}, True),
    ("train", "offload"): ({}, ["swap-optimizer"]),
    ("train", "lora"): ({}, {"r": 16}),
    ("train", "packing"): ({}, True),
    ("train", "mean_document"): ({}, 512),
    ("train", "variable_seq"): ({}, True),
    ("train", "task"): ({}, "dpo"),
    ("train", "dropout"): ({}, True),
    ("train", "loss_slices"): ({}, 4),
    ("train", "loss_in_place"): ({"train": {"cross_entropy_fusion": False}}, False),
    ("train", "own_masks"): ({}, 0.5),
    ("train", "rope_fusion"): ({}, False),
    ("train", "bias_activation_fusion"): ({"model": {**_EXPERTS, "expert_clamp": True}}, False),
    ("train", "grad_reduce_in_bf16"): ({}, True),
    ("train", "fp8_param_gather"): ({"train": {"precision": "fp8"}}, False),
    ("train", "main_params_dtype"): ({}, "fp16"),
    ("train", "exp_avg_dtype"): ({}, "bf16"),
    ("train", "exp_avg_sq_dtype"): ({}, "bf16"),
    ("train", "optimizer_cpu_offload"): ({}, True),
    ("train", "optimizer_offload_fraction"): ({"train": {"optimizer_cpu_offload": True}}, 0.5),
    ("train", "cpu_offloading_num_layers"): ({"parallel": {"pp": 1}}, 8),
    ("train", "grouped_gemm"): ({"model": _EXPERTS}, False),
    ("train", "gradient_accumulation_fusion"): ({}, False),
    ("train", "cuda_graph"): ({}, "full_iteration"),
    ("train", "routing_imbalance"): ({"model": _EXPERTS}, 1.5),
    ("train", "fp8_dot_product_attention"): ({"model": {"mla": _LATENT}, "train": {"precision": "fp8"}}, True),
    ("train", "software"): ({"model": _MAMBA}, "nemo-25.11"),
    ("model", "attention_gate"): ({}, True),
    ("model", "residual_blocks"): ({}, 4.0),
    ("model", "linear_bias"): ({}, True),
    ("model", "moe_latent"): ({"model": _EXPERTS}, 1024),
}
_ELSEWHERE = {
    ("model", "type"),
    *(("model", key) for key in ("num_layers", "hidden", "heads", "ffn", "seq", "vocab", "swiglu", "layer_pattern")),
    *(("model", key) for key in ("num_experts", "topk", "moe_ffn", "vision_encoder")),
    *(("hw", key) for key in ("gpu", "num_gpus", "gpus_per_node")),
    *(("parallel", key) for key in ("tp", "pp", "dp", "encoder_layer_list")),
    *(("train", key) for key in ("gbs", "mbs", "optimizer")),
}
"""Sizes that every request has, what only other keys give a meaning, and names of which one is known."""


_OF_THE_LOSS = {("train", "loss_slices"), ("train", "loss_in_place"), ("train", "cross_entropy_fusion")}
"""They move the loss's memory, which is not always the peak."""


def _with(*changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    request = copy.deepcopy(_BASE)
    for change in changes:
        for section, values in change.items():
            request[section].update(values)
    return request


def _moved(request: dict[str, Any], key: tuple[str, str]) -> bool:
    """Return whether ``key`` moves time or memory of ``request``, is refused, or is named."""
    without = copy.deepcopy(request)
    del without[key[0]][key[1]]
    answer, other = predict_one(request), predict_one(without)
    if "error" in (answer["status"], other["status"]):
        return True  # refused with its reason, or needed to be accepted
    figures = [
        (item["step_time_ms"], [stage["peak_memory_gib"] for stage in item["stages"]]) for item in (answer, other)
    ]
    return figures[0] != figures[1] or any(f"{key[0]}.{key[1]}" in note for note in answer["notes"])


def test_every_known_key_is_tried() -> None:
    known = {(section, key) for section, keys in KNOWN.items() for key in keys}
    assert known - _ELSEWHERE == set(_VALUES)


@pytest.mark.parametrize("key", sorted(_VALUES), ids=".".join)
def test_a_key_moves_the_prediction_or_is_named(key: tuple[str, str]) -> None:
    beside, value = _VALUES[key]
    assert _moved(_with(beside, {key[0]: {key[1]: value}}), key)


def test_keys_in_drawn_company_move_the_prediction_or_are_named() -> None:
    generator = random.Random(29)
    for _ in range(40):
        keys = generator.sample(sorted(set(_VALUES) - _OF_THE_LOSS), 3)
        changes = [{section: {key: _VALUES[section, key][1]}} for section, key in keys]
        request = _with(*(_VALUES[key][0] for key in keys), *changes)
        if {("parallel", "account_for_embedding"), ("parallel", "account_for_loss")} <= set(keys):
            # Every place counts here; 15 layers on two stages would lie as with one of the keys.
            request["model"]["num_layers"], request["parallel"]["pp"] = 13, 4
        for key in keys:
            by_default = key == ("parallel", "sp") and "stack" in request["train"]  # off in 2021's software anyway
            assert by_default or _moved(request, key), (key, request)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"mla": {"kv_lora_rank": 512}}, "qk_nope_head_dim is missing"),
        ({"mamba": {"num_heads": 32}}, "model.mamba is given, but no layer has it"),
        ({"linear_attention": _HEADS}, "model.linear_attention is given, but no layer has it"),
    ],
)
def test_parts_of_a_model_that_no_layer_has_are_refused(model: dict[str, Any], words: str) -> None:
    answer = predict_one(_with({"model": model}))
    assert answer["status"] == "error"
    assert words in answer["reason"]


def test_packed_examples_without_a_mean_length_say_what_is_assumed() -> None:
    notes = predict_one(_with({"train": {"packing": True, "task": "sft"}}))["notes"]
    assert any("documents of 1024 tokens are assumed" in note for note in notes)
    notes = predict_one(_with({"train": {"packing": True}}))["notes"]
    assert any("causal square" in note for note in notes)

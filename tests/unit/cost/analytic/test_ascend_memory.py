"""What MindSpeed's software keeps on Ascend, against peaks that MindSpeed-LLM's CI measured and by counting bytes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prices import step_ms

from mindspeed_autoparallel.cost.analytic.activations import head_bytes, layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.predict.price import price

_GEMMA2: dict[str, Any] = {
    "model": {
        "num_layers": 42, "hidden": 3584, "heads": 16, "kv_heads": 8, "head_size": 256, "ffn": 14336, "seq": 8192,
        "vocab": 256000, "swiglu": True, "activation": "gelu_tanh", "logit_softcap": True, "post_norm": True,
        "tied_embeddings": True,
    },
    "hw": {"gpu": "Ascend-910B", "num_gpus": 8},
    "parallel": {"tp": 8},
    "train": {"gbs": 8, "mbs": 1, "cross_entropy_fusion": False, "loss_in_place": False, "own_masks": 0.5},
}  # fmt: skip
_QWEN3: dict[str, Any] = {
    "model": {
        "num_layers": 1, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 12288, "seq": 4096, "vocab": 151936,
        "swiglu": True,
    },
    "hw": {"gpu": "Ascend-910B", "num_gpus": 8},
    "parallel": {"tp": 2},
    "train": {"gbs": 8, "mbs": 1, "cross_entropy_fusion": False},
}  # fmt: skip


def _with(request: dict[str, Any], section: str, **values: object) -> dict[str, Any]:
    changed = copy.deepcopy(request)
    changed[section].update(values)
    return changed


def _first_step_gib(request: dict[str, Any]) -> float:
    return float(predict_one(request)["stages"][0]["first_step_peak_gib"])


def test_the_peak_of_gemma2_is_the_ones_that_was_measured() -> None:
    # tests/st/baseline_results/gemma2_tp8_pp1_ptd.json, September 2024.
    assert _first_step_gib(_GEMMA2) == pytest.approx(27.09, rel=0.03)


def test_the_peak_of_a_preference_run_is_the_one_that_was_measured() -> None:
    # tests/st/baseline_results/dpo_qwen3_8b_tp2_pp1_cyclic_pairwise.json, June 2026.
    assert _first_step_gib(_with(_QWEN3, "train", task="dpo")) == pytest.approx(20.70, rel=0.03)


def test_the_first_steps_peak_has_a_copy_of_the_largest_tensor_that_is_updated() -> None:
    # tests/st/baseline_results/phi35_moe_tp1_pp8_mcore.json, January 2025: sixteen experts are one tensor.
    model = {"num_layers": 8, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 6400, "seq": 4096, "vocab": 32064}
    experts = {"type": "moe", "num_experts": 16, "topk": 2, "moe_ffn": 6400, "swiglu": True, "dispatcher": "allgather"}
    train = {"gbs": 64, "mbs": 1, "gradient_accumulation_fusion": False, "cross_entropy_fusion": False}
    parallel = {"tp": 1, "pp": 8, "ep": 1}
    stages = predict_one({**_QWEN3, "model": model | experts, "parallel": parallel, "train": train})["stages"]
    assert [stage["first_step_peak_gib"] for stage in stages] == pytest.approx([27.13, *[24.99] * 6, 27.19], rel=0.01)


def test_the_peak_of_a_run_in_fp16_is_the_one_that_was_measured() -> None:
    # tests/st/baseline_results/pretrain_qwen3_8b_4k_hybridcp_gqa.json: states and the fp32 gradients of what a rank
    # updates, half a GiB less than gradients in fp32 would take.
    request = _with(_QWEN3, "parallel", cp=4, cp_type="hybrid_cp_algo", ulysses_degree=2)
    half = _with(request, "train", precision="fp16")
    assert _first_step_gib(half) == pytest.approx(5.385, rel=0.06)
    gradients = [predict_one(each)["stages"][0]["gradients_gib"] for each in (half, request)]
    assert gradients[0] * 2 == pytest.approx(gradients[1])


def test_a_loss_that_is_not_in_place_and_a_capped_one_keep_more_per_logit() -> None:
    logits = 4096 * 151936 / 2
    for model, train, each in (
        ({}, {}, 2 + 4),
        ({}, {"loss_in_place": False}, 2 + 8),
        ({"logit_softcap": True}, {}, 4 + 4),
        ({}, {"task": "simpo"}, 2 * 16),
    ):
        work = read_workload(_with(_with(_QWEN3, "model", **model), "train", **train))
        assert head_bytes(work) == pytest.approx(each * logits, rel=1e-3)


def test_activation_functions_that_are_no_single_kernel_keep_what_their_backward_reads() -> None:
    width = 4096 * 12288 / 2 * 2
    kept = {
        name: layer_activation_bytes(read_workload(_with(_QWEN3, "model", activation=name)))
        for name in ("fused", "gelu", "gelu_tanh")
    }
    assert kept["gelu"] - kept["fused"] == width
    assert kept["gelu_tanh"] - kept["fused"] == 4 * width


def test_attention_keeps_more_on_ascend_than_on_other_devices() -> None:
    on_ascend = layer_activation_bytes(read_workload(_QWEN3))
    elsewhere = layer_activation_bytes(read_workload(_with(_QWEN3, "hw", gpu="H100")))
    # Two statistics of eight fp32 per head in place of one, and four tables of a head's width.
    assert on_ascend - elsewhere == 4096 * 16 * (64 - 4) + 4 * 4096 * 128 * 2


def test_keys_are_repeated_before_heads_are_exchanged() -> None:
    ring = layer_activation_bytes(read_workload(_with(_QWEN3, "parallel", cp=4, cp_type="megatron_cp_algo")))
    heads = layer_activation_bytes(read_workload(_with(_QWEN3, "parallel", cp=4, cp_type="ulysses_cp_algo")))
    assert heads - ring == 1024 * 2 * (4096 - 1024) / 2 * 2


def test_kernels_that_are_not_fused_take_time() -> None:
    device = find_device("Ascend-910B")

    def milliseconds(request: dict[str, Any]) -> float:
        return step_ms(read_workload(request), device)

    assert milliseconds(_with(_QWEN3, "train", rope_fusion=False)) > milliseconds(_QWEN3)
    assert milliseconds(_GEMMA2) > milliseconds(_with(_GEMMA2, "model", activation="fused"))


def test_collectives_that_are_cut_up_with_products_show_where_products_are_short() -> None:
    device = find_device("Ascend-910B")

    def gained(hidden: int) -> float:
        steps = []
        for overlap in (False, True):
            request = _with(_with(_QWEN3, "model", hidden=hidden, ffn=4 * hidden), "train", tp_comm_overlap=overlap)
            steps.append(price(read_workload(_with(request, "parallel", tp=8)), device).step.pipeline_us)
        return (steps[0] - steps[1]) / steps[0]

    # Twice the width is twice the bytes and four times the products, behind which more of the bytes hide.
    assert 0 < gained(2048) < gained(8192)


@pytest.mark.parametrize(
    ("section", "values", "said"),
    [
        ("model", {"activation": "relu6"}, "model.activation is 'relu6', must be one of fused, gelu, gelu_tanh."),
        ("train", {"own_masks": 2}, "train.own_masks"),
        ("train", {"rope_fusion": "perhaps"}, "train.rope_fusion"),
    ],
)
def test_words_that_mean_nothing_are_refused(section: str, values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_workload(_with(_QWEN3, section, **values))

"""Memory formulas against figures printed in papers and logs."""

import copy

import pytest
from prices import memory_of

from mindspeed_autoparallel.cost.analytic.activations import head_bytes, layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.analytic.states import in_flight_layers

_GIB = 2**30
_GPT3 = {
    "model": {"type": "gpt", "num_layers": 96, "hidden": 12288, "heads": 96, "seq": 2048},
    "hw": {"gpu": "A100-80GB", "num_gpus": 64},
    "parallel": {"tp": 8, "pp": 8, "vpp": 3},
    "train": {"gbs": 64, "mbs": 1, "recompute": "none"},
}
_LLAMA = {
    "model": {
        "type": "gpt",
        "num_layers": 12,
        "hidden": 8192,
        "heads": 64,
        "kv_heads": 8,
        "ffn": 28672,
        "seq": 4096,
        "vocab": 128256,
        "swiglu": True,
    },
    "hw": {"gpu": "B200", "num_gpus": 8},
    "parallel": {"tp": 2, "pp": 1},
    "train": {"gbs": 16, "mbs": 1, "recompute": "none"},
}


def _with(request: dict, section: str, **values: object) -> dict:
    changed = copy.deepcopy(request)
    changed[section].update(values)
    return changed


@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "published_gib"), [(False, "none", 66.84), (True, "selective", 12.35)]
)
def test_activation_memory_is_that_of_korthikanti_figure_1(
    sequence_parallel: bool, recompute: str, published_gib: float
) -> None:
    request = _with(_with(_GPT3, "parallel", sp=sequence_parallel), "train", recompute=recompute)
    work = read_workload(request)
    predicted = layer_activation_bytes(work) * in_flight_layers(work, 0) / _GIB
    assert predicted == pytest.approx(published_gib, rel=0.02)


def test_peak_of_a_published_llama_run_is_within_two_percent() -> None:
    # SimuMax b200 summary, llama3_70b_tp2_pp1_dp4_l12: 60.68 GiB most allocated.
    memory = memory_of(read_workload(_LLAMA), 0)
    assert (memory.peak_bytes - memory.runtime_overhead_bytes) / _GIB == pytest.approx(60.68, rel=0.02)


def test_more_recompute_never_takes_more_saved_activation() -> None:
    for base in (_GPT3, _LLAMA):
        saved = [
            layer_activation_bytes(read_workload(_with(base, "train", recompute=kind)))
            for kind in ("none", "selective", "full")
        ]
        assert saved == sorted(saved, reverse=True)


def test_earlier_stages_hold_more_microbatches() -> None:
    work = read_workload(_with(_with(_GPT3, "parallel", vpp=1), "train", gbs=256))
    held = [in_flight_layers(work, stage) for stage in range(8)]
    assert held == sorted(held, reverse=True)
    assert held[0] == 96
    assert held[-1] == 12


def test_few_microbatches_limit_what_is_in_flight() -> None:
    work = read_workload(_with(_with(_GPT3, "parallel", vpp=1), "train", gbs=2))
    assert in_flight_layers(work, 0) == 24


def test_distributed_optimizer_shards_the_state_over_data_and_context_ranks() -> None:
    whole = memory_of(read_workload(_with(_LLAMA, "parallel", dist_opt=False)), 0)
    shared = memory_of(read_workload(_LLAMA), 0)
    assert whole.terms["optimizer"] == pytest.approx(4 * shared.terms["optimizer"])


_TINY = {
    "model": {"type": "gpt", "num_layers": 12, "hidden": 512, "heads": 8, "seq": 1024, "vocab": 51200},
    "hw": {"gpu": "A100", "num_gpus": 8},
    "parallel": {"dist_opt": True},
    "train": {"gbs": 32, "mbs": 4, "stack": "megatron-core", "cross_entropy_fusion": False},
}


@pytest.mark.parametrize(
    ("parallel", "train", "published_gib"),
    [
        # Golden values of Megatron-LM's own tests, on A100.
        ({}, {"attention": "unfused"}, 4.36),
        ({"dist_opt": False}, {"recompute": "full"}, 2.36),
        ({"dist_opt": False, "pp": 4}, {"attention": "unfused"}, 2.49),
        ({"dist_opt": False, "tp": 2, "cp": 2, "sp": True}, {}, 1.06),
    ],
)
def test_peaks_of_published_tiny_models_are_within_four_percent(
    parallel: dict, train: dict, published_gib: float
) -> None:
    work = read_workload(_with(_with(_TINY, "parallel", **parallel), "train", **train))
    assert memory_of(work, work.pipeline_size - 1).peak_bytes / _GIB == pytest.approx(published_gib, rel=0.04)


def test_attention_that_is_not_fused_keeps_its_matrices_unless_it_is_computed_again() -> None:
    saved = {
        (attention, recompute): layer_activation_bytes(
            read_workload(_with(_TINY, "train", attention=attention, recompute=recompute))
        )
        for attention in ("fused", "unfused")
        for recompute in ("none", "selective", "full")
    }
    statistics = 4 * 8 * 4 * 1024
    matrices = 5 * 8 * 4 * 1024 * 1024  # softmax and its dropped copy in bf16, one byte of mask
    assert saved["unfused", "none"] - saved["fused", "none"] == matrices - statistics
    assert saved["unfused", "selective"] == saved["fused", "selective"] - statistics
    assert saved["unfused", "full"] == saved["fused", "full"]


@pytest.mark.parametrize(("stack", "num_copies"), [("megatron-core", 1), ("megatron-2021", 2)])
def test_a_loss_that_is_not_fused_adds_fp32_copies_of_the_logits(stack: str, num_copies: int) -> None:
    work = read_workload(_with(_TINY, "train", stack=stack))
    assert head_bytes(work) == 4 * 1024 * 51200 * (2 + 4 * num_copies)


def test_clamped_activations_of_experts_are_kept_too_where_no_fused_kernel_clamps() -> None:
    model = {"type": "moe", "num_experts": 8, "topk": 2, "moe_ffn": 1024, "swiglu": True}
    plain = read_workload(_with(_TINY, "model", **model))
    clamping = _with(_TINY, "model", **model, expert_clamp=True)
    assert layer_activation_bytes(read_workload(clamping)) == layer_activation_bytes(plain)
    clamped = read_workload(_with(clamping, "train", bias_activation_fusion=False))
    rows = 4 * 1024 * 2
    assert layer_activation_bytes(clamped) - layer_activation_bytes(plain) == rows * 2 * 1024 * 2

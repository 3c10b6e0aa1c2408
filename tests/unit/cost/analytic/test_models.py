"""Parameters of published models, counted from what their configurations say."""

from typing import Any

import pytest

from mindspeed_autoparallel.cost.analytic.kernels import memory_pass_us
from mindspeed_autoparallel.cost.analytic.mixers import mixing
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.parameters import stage_parameters
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.cost.collectives import Fabric

_DEEPSEEK_V3: dict[str, Any] = {
    "type": "moe", "num_layers": 61, "hidden": 7168, "heads": 128, "ffn": 18432, "moe_ffn": 2048, "num_experts": 256,
    "topk": 8, "shared_expert_ffn": 2048, "num_dense_layers": 3, "vocab": 129280, "swiglu": True, "seq": 4096,
    "mla": {"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
            "v_head_dim": 128},
}  # fmt: skip
_QWEN3_30B: dict[str, Any] = {
    "type": "moe", "num_layers": 48, "hidden": 2048, "heads": 32, "kv_heads": 4, "head_dim": 128, "ffn": 6144,
    "moe_ffn": 768, "num_experts": 128, "topk": 8, "vocab": 151936, "swiglu": True, "seq": 4096,
}  # fmt: skip
_MAMBA2: dict[str, Any] = {
    "type": "mamba", "num_layers": 64, "hidden": 2560, "heads": 1, "seq": 2048, "vocab": 50288, "swiglu": True,
    "tied_embeddings": True, "mamba": {"num_heads": 80, "head_dim": 64, "state_dim": 128, "num_groups": 1},
}  # fmt: skip
_NEMOTRON_H_8B: dict[str, Any] = {
    "type": "hybrid", "hidden": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "ffn": 21504, "vocab": 131072,
    "seq": 8192, "swiglu": False, "num_experts": 0, "tied_embeddings": False,
    "layer_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "mamba": {"num_heads": 128, "head_dim": 64, "state_dim": 128, "num_groups": 8},
}  # fmt: skip


def _total(model: dict[str, Any]) -> float:
    request = {
        "model": model,
        "hw": {"gpu": "H100", "num_gpus": 1},
        "parallel": {},
        "train": {"gbs": 1, "mbs": 1, "stack": "megatron-core"},
    }
    parameters = stage_parameters(read_workload(request), 0)
    return parameters.shared + parameters.expert


@pytest.mark.parametrize(
    ("model", "published"),
    [(_DEEPSEEK_V3, 671.0e9), (_QWEN3_30B, 30.5e9), (_MAMBA2, 2.7e9), (_NEMOTRON_H_8B, 8.1e9)],
    ids=["deepseek-v3", "qwen3-30b-a3b", "mamba2-2.7b", "nemotron-h-8b"],
)
def test_parameters_are_those_that_were_published(model: dict[str, Any], published: float) -> None:
    assert _total(model) == pytest.approx(published, rel=0.015)


def test_a_layer_that_predicts_further_tokens_adds_a_layer_and_a_joining_product() -> None:
    added = _total({**_DEEPSEEK_V3, "mtp_layers": 1}) - _total(_DEEPSEEK_V3)
    # DeepSeek-V3's report: 14 B beside the main model, embedding and head shared with it (11.5 B of its own).
    assert added == pytest.approx(11.5e9, rel=0.03)


# What the kernels of Mamba-2's forward and backward read and write: bf16 tensors as wide as the inner width (x, z, out),
# the state's inputs (b, c), states of a chunk and products in a chunk in fp32 (4) or bf16 (2).
_FORWARD = {
    "convolution": "x b c x b c", "chunk_state": "x b states4", "state_passing": "states4 states2", "bmm": "b c products",
    "chunk_scan": "products x c states2 x", "norm": "x z x",
}  # fmt: skip
_BACKWARD = {
    "norm": "x x z x z", "convolution": "x b c x b c", "bmm": "b c products", "chunk_state": "x b states4",
    "state_passing": "states4 states4", "dstates": "x c states4",
    "state_passing_backward": "states4 states4 states2 states2", "dx": "x x b products states2 x",
    "db": "x states2 b fp32", "dc": "x states2 c fp32", "dcb": "x x products", "bmm_backward": "products products b c",
    "residuals": "fp32 fp32 b c", "dda": "x x products", "convolution_backward": "x b c x b c x b c",
}  # fmt: skip


@pytest.mark.parametrize("state", [64, 128, 256])
def test_mamba_moves_the_bytes_that_its_kernels_list(state: int) -> None:
    request = {
        "model": {**_NEMOTRON_H_8B, "mamba": {**_NEMOTRON_H_8B["mamba"], "state_dim": state}},
        "hw": {"gpu": "H100", "num_gpus": 1},
        "parallel": {},
        "train": {"gbs": 1, "mbs": 1},
    }
    work, device = read_workload(request), find_device("H100")
    efficiency = device.efficiency("megatron-core")
    inner, groups, chunk = 128 * 64, 8, 128
    wide = {
        "x": inner * 2,
        "z": inner * 2,
        "b": groups * state * 2,
        "c": groups * state * 2,
        "fp32": groups * state * 4,
    }
    wide |= {"states4": inner * state / chunk * 4, "states2": inner * state / chunk * 2, "products": groups * chunk * 4}

    def moved_us(kernels: dict[str, str]) -> float:
        size = sum(wide[name] for kernel in kernels.values() for name in kernel.split())
        return memory_pass_us(device, efficiency, work.tokens * size)

    core = mixing(work, device, efficiency, Fabric.of(device, efficiency, 8, None), LayerKind("mamba", "none")).core
    between = core.input_gradient_us - 2.5 * core.forward_us
    assert between == pytest.approx(moved_us(_BACKWARD) - 2.5 * moved_us(_FORWARD), rel=0.1)

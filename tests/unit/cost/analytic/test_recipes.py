"""What the recipes of 2025-26 set: bytes that are counted by hand beside those of the formulas."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from prices import memory_of, step_ms

from mindspeed_autoparallel.cost.analytic.activations import layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.kernels import product_us, quantize_bytes
from mindspeed_autoparallel.cost.analytic.reading import read_workload
from mindspeed_autoparallel.cost.catalogue import find_device
from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.predict.predict import predict_one
from mindspeed_autoparallel.spec.plan_records import RankMemory

_HIDDEN, _FFN, _SEQUENCE, _LAYERS, _VOCABULARY = 4096, 14336, 8192, 8, 128256
_LINEAR = _LAYERS * (_HIDDEN * (2 * 4096 + 2 * 1024) + 3 * _HIDDEN * _FFN)
_TABLES = 2 * _VOCABULARY * _HIDDEN
_REQUEST: dict[str, Any] = {
    "model": {
        "type": "gpt",
        "num_layers": _LAYERS,
        "hidden": _HIDDEN,
        "heads": 32,
        "kv_heads": 8,
        "ffn": _FFN,
        "seq": _SEQUENCE,
        "vocab": _VOCABULARY,
        "swiglu": True,
    },
    "hw": {"gpu": "H100", "num_gpus": 8},
    "parallel": {},
    "train": {"gbs": 64, "mbs": 1},
}


def _with(gpu: str = "H100", parallel: dict[str, Any] | None = None, **train: object) -> dict[str, Any]:
    changed = copy.deepcopy(_REQUEST)
    changed["hw"]["gpu"] = gpu
    changed["parallel"].update(parallel or {})
    changed["train"].update(train)
    return changed


def _memory(gpu: str = "H100", parallel: dict[str, Any] | None = None, **train: object) -> RankMemory:
    return memory_of(read_workload(_with(gpu, parallel, **train)), 0)


def _ms(gpu: str = "H100", parallel: dict[str, Any] | None = None, **train: object) -> float:
    return step_ms(read_workload(_with(gpu, parallel, **train)))


@pytest.mark.parametrize(
    ("gpu", "train", "bytes_per_weight"),
    [
        ("H100", {"precision": "bf16"}, 2),
        ("H100", {"precision": "fp8"}, 2),  # along rows and, transposed, along columns
        ("GB200", {"precision": "fp8"}, 1),  # Blackwell's products read one copy both ways
        ("GB200", {"precision": "mxfp8"}, 2 * 33 / 32),
        ("GB200", {"precision": "nvfp4"}, 2 * 9 / 16),
        ("H100", {"precision": "fp8", "fp8_param_gather": False}, 4),
        ("H100", {"precision": "fp8_blockwise"}, 2 + 2 * (1 + 4 / 128)),
    ],
)
def test_weights_of_products_take_what_the_recipe_keeps_of_them(
    gpu: str, train: dict[str, object], bytes_per_weight: float
) -> None:
    expected = 2 * _TABLES + bytes_per_weight * _LINEAR
    assert _memory(gpu, **train).terms["parameters"] == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("train", "size"),
    [
        ({}, 4),
        ({"grad_reduce_in_bf16": True}, 2),
        ({"precision": "fp8"}, 2),
        ({"precision": "fp8", "grad_reduce_in_bf16": False}, 4),
    ],
)
def test_gradients_take_the_bytes_in_which_they_are_reduced(train: dict[str, object], size: int) -> None:
    assert _memory(**train).terms["gradients"] == pytest.approx(size * (_LINEAR + _TABLES), rel=1e-3)
    if size == 2:
        slow = {"parallel": {}, "overlap_grad_reduce": False}
        assert _ms(**slow, **train) < _ms(**slow, **{**train, "grad_reduce_in_bf16": False})


def test_eight_bit_operands_are_saved_in_eight_bits_and_the_rest_is_not() -> None:
    tokens, size = _SEQUENCE, {"bf16": 2.0, "fp8": 1.0, "nvfp4": 9 / 16}
    for precision, operand in size.items():
        norms = 2 * _HIDDEN * (2 + operand)
        output = 4096 * (2 + (operand if precision != "bf16" else 0))
        attention = 2 * (4096 + 2 * 1024) + output
        mlp = _FFN * (2 * 2 + operand)
        expected = tokens * (norms + attention + mlp + 4 * 32)
        work = read_workload(_with("GB200", precision=precision))
        assert layer_activation_bytes(work) == pytest.approx(expected)


def test_state_of_a_precision_aware_optimizer_takes_its_types() -> None:
    owned = (_LINEAR + _TABLES) / 8
    assert _memory().terms["optimizer"] == pytest.approx(12 * owned, rel=1e-3)
    assert _memory(exp_avg_dtype="bf16", exp_avg_sq_dtype="fp8").terms["optimizer"] == pytest.approx(
        7 * owned, rel=1e-3
    )
    assert _memory(main_params_dtype="fp16").terms["optimizer"] == pytest.approx(10 * owned, rel=1e-3)
    with pytest.raises(ConfigError, match="exp_avg_dtype is 'int3'"):
        _memory(exp_avg_dtype="int3")


def test_an_optimizer_on_the_host_takes_time_for_memory() -> None:
    half = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}
    assert _memory(**half).terms["optimizer"] == pytest.approx(_memory().terms["optimizer"] / 2)
    assert _ms() < _ms(**half) < _ms(optimizer_cpu_offload=True)


def test_sharding_divides_what_it_names_and_its_replicas_hold_more() -> None:
    plain = _memory()
    gradients = _memory(parallel={"fsdp": 8, "sharding_strategy": "optim_grads"})
    assert gradients.terms["parameters"] == plain.terms["parameters"]
    assert gradients.terms["gradients"] == pytest.approx(plain.terms["gradients"] / 8)
    deep = _with()
    deep["model"]["num_layers"] = 80
    held = []
    for size in (1, 4, 8):
        work = read_workload({**deep, "parallel": {"fsdp": size}})
        held.append(memory_of(work, 0).terms["parameters"])
    assert held[0] > held[1] > held[2]
    with pytest.raises(ConfigError, match="fsdp 3 does not divide"):
        _memory(parallel={"fsdp": 3})
    with pytest.raises(ConfigError, match="FSDP2"):
        read_workload(_with("Ascend-910B", {"fsdp": 8}))


def test_offloaded_layers_leave_the_device_and_wait_for_the_link() -> None:
    assert _memory(cpu_offloading_num_layers=4).peak_bytes < _memory().peak_bytes
    assert _ms(cpu_offloading_num_layers=4) >= _ms()


def test_four_bits_are_faster_than_eight_and_move_more_to_quantize() -> None:
    device = find_device("GB300")
    efficiency = device.efficiency("megatron-core")
    four, eight = (product_us(device, efficiency, 8192, 8192, 8192, recipe=recipe) for recipe in ("nvfp4", "mxfp8"))
    assert four == pytest.approx(eight / 3)
    assert quantize_bytes("nvfp4", transposed=False) > quantize_bytes("mxfp8", transposed=False)
    with pytest.raises(ConfigError, match="no peak_fp4_tflops"):
        answer = predict_one(_with("H100", precision="nvfp4"))
        raise ConfigError(answer["reason"])


def test_a_run_that_fits_only_with_switches_it_leaves_open_is_answered_with_them_by_name() -> None:
    tight = _with("H100")
    tight["model"]["num_layers"] = 36
    answer = predict_one(tight)
    assert answer["status"] == "ok"
    assert answer["assumed"].startswith("gradients reduced and kept in bf16")
    assert any("assumed here" in note for note in answer["notes"])
    said = copy.deepcopy(tight)
    said["train"].update(grad_reduce_in_bf16=False, exp_avg_dtype="fp32", cpu_offloading_num_layers=0)
    said["parallel"]["fsdp"] = 1
    assert predict_one(said)["status"] == "out_of_memory"

"""Reads the section ``train`` of a prediction request: precision, optimizer, recompute, adapters and switches."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.cost.analytic.fields import integer, number, optional_section, switch, words
from mindspeed_autoparallel.cost.analytic.model_shape import ModelShape
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES, RECOMPUTE, Adapters, Recipe, RecomputeDetail
from mindspeed_autoparallel.errors import ConfigError

_BYTES = {
    **dict.fromkeys(("fp16", "bf16", "float16", "bfloat16", *OPERAND_BYTES), 2),
    **dict.fromkeys(("fp32", "float32"), 4),
}
GRAPHS = {"none": (0.0, True), "local": (0.9, True), "full_iteration": (0.95, True), "transformer_engine": (0.9, False)}
"""Share of launches that a captured graph replays, and whether experts are captured: Transformer Engine captures
attention, dense layers and the router of expert layers, but not the work on rows whose number the host waits for."""
_OFFLOADS = ("swap-optimizer", "swap-attention")
_PREFERENCES = ("dpo", "simpo")
_SUPERVISED = ("sft", "peft", "lora")
_STATE_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp8": 1.0}
"""Of a precision-aware optimizer's state; a master weight in fp16 is what the bf16 parameter lacks."""


def read_training(train: Mapping[str, object], gpu: str, stack: str) -> dict[str, Any]:
    """Return the fields of ``Workload`` that the section ``train`` states; ``gpu`` and ``stack`` choose defaults.

    Raises ``ConfigError`` with the key, the value and the rule.
    """
    precision = _precision(train)
    recipe = recipe_of(train)
    gradient_overlap, tensor_overlap = train.get("overlap_grad_reduce"), train.get("tp_comm_overlap")
    return {
        "gradient_overlap": None if gradient_overlap is None else bool(gradient_overlap),
        "tensor_overlap": None if tensor_overlap is None else bool(tensor_overlap),
        "expert_overlap": bool(train.get("moe_a2a_overlap", False)),
        "element_bytes": _BYTES[precision],
        "half_precision": precision in ("fp16", "float16"),
        "recipe": recipe,
        # What Megatron-Bridge's recipes set: its eight- and four-bit ones reduce in bf16 and gather quantized
        # parameters, except blockwise ones, whose parameters stay in bf16.
        "reduced_in_two_bytes": bool(switch(train, "grad_reduce_in_bf16", bool(recipe), "train")),
        "quantized_parameters": _quantized_parameters(train, recipe),
        **_optimizer(train),
        "offloaded_layers": integer(train, "cpu_offloading_num_layers", 0, "train", 0),
        "adapters": _adapters(train),
        "grouped_products": bool(train.get("grouped_gemm", True)),
        "fused_weight_gradients": bool(train.get("gradient_accumulation_fusion", True)),
        "shared_master_weights": bool(train.get("reuse_fp32_param", False)),
        "swapped_optimizer": "swap-optimizer" in _offload(train),
        **_graph(train),
        "quantized_attention": bool(switch(train, "fp8_dot_product_attention", False, "train")) and bool(recipe),
        "preference": str(train.get("task")) if train.get("task") in _PREFERENCES else "",
        "supervised": str(train.get("task")).lower().startswith(_SUPERVISED),
        "dropout": bool(switch(train, "dropout", True, "train")),
        "fused_activation": bool(switch(train, "bias_activation_fusion", True, "train")),
        "fused_rotary": bool(switch(train, "rope_fusion", True, "train")),
        "loss_in_place": bool(switch(train, "loss_in_place", True, "train")),
        "own_masks": number(train, "own_masks", 0.0, "train", 0.0, 1.0),
        "loss_slices": integer(train, "loss_slices", 1, "train"),
        "imbalance": number(train, "routing_imbalance", 1.0, "train", 1.0, 1e3),
    }


def _precision(train: Mapping[str, object]) -> str:
    precision = str(train.get("precision") or "bf16").lower()
    if precision not in _BYTES:
        raise ConfigError(f"train.precision is {precision!r}, known: {', '.join(_BYTES)}.")
    return precision


def recipe_of(train: Mapping[str, object]) -> Recipe:
    """Return the eight- or four-bit recipe of the section ``train``, or an empty string."""
    precision = _precision(train)
    return precision if precision in OPERAND_BYTES else ""


def _quantized_parameters(train: Mapping[str, object], recipe: Recipe) -> bool:
    stated = switch(train, "fp8_param_gather", None, "train")
    if stated and not recipe:
        raise ConfigError("train.fp8_param_gather is true, but train.precision has no eight- or four-bit recipe.")
    return bool(recipe) and recipe != "fp8_blockwise" if stated is None else bool(stated)


def _optimizer(train: Mapping[str, object]) -> dict[str, float]:
    """Return the bytes per parameter of a precision-aware optimizer's state, and the share of it on the host."""

    def size(key: str) -> float:
        name = state_type(train.get(key))
        if name not in _STATE_BYTES:
            raise ConfigError(f"train.{key} is {train[key]!r}, known: {', '.join(_STATE_BYTES)}.")
        return _STATE_BYTES[name]

    host = number(train, "optimizer_offload_fraction", 1.0, "train", 0.0, 1.0)
    return {
        "master_bytes": size("main_params_dtype"),
        "moment_bytes": size("exp_avg_dtype") + size("exp_avg_sq_dtype"),
        "optimizer_on_host": host if switch(train, "optimizer_cpu_offload", False, "train") else 0.0,
    }


def state_type(value: object) -> str:
    """Return Megatron's short name of a type of the optimizer's state; fp32 by default."""
    name = str(value or "fp32").removeprefix("torch.")
    return {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}.get(name, name)


def read_recompute(train: Mapping[str, object]) -> str:
    """Return which of ``RECOMPUTE`` the request states; ``none`` by default."""
    recompute = str(train.get("recompute") or "none").lower()
    if recompute not in RECOMPUTE:
        raise ConfigError(f"train.recompute is {recompute!r}, must be one of {', '.join(RECOMPUTE)}.")
    return recompute


def read_recompute_detail(train: Mapping[str, object], model: ModelShape) -> RecomputeDetail:
    """Return which layers and modules are recomputed."""
    method = train.get("recompute_method") or "uniform"
    if method not in ("uniform", "block"):
        raise ConfigError(f"train.recompute_method is {method!r}, must be uniform or block.")
    extra = words(train, "recompute_extra", "train")

    def layers(name: str) -> int | None:
        if name not in extra:
            return None
        stated = [word.split("=")[1] for word in extra if word.startswith(f"{name}-num-layers=")]
        return int(stated[0]) if stated and stated[0].isdigit() else model.num_layers

    return RecomputeDetail(
        method=method,
        num_layers=integer(train, "recompute_num_layers", 1, "train"),
        per_rank=bool(train.get("recompute_per_pp_rank", False)),
        modules=words(train, "recompute_modules", "train") or ("core_attn",),
        activation_layers=layers("recompute-activation-function"),
        norm_layers=layers("recompute-norm"),
    )


def _adapters(train: Mapping[str, object]) -> Adapters | None:
    values = optional_section(train, "lora", "train")
    if values is None:
        return None
    if values.get("qlora"):
        raise ConfigError("train.lora.qlora is true: quantized frozen weights are not modelled.")
    rank = integer(values, "r", integer(values, "dim", 8, "train.lora"), "train.lora")
    targets = values.get("targets", values.get("target_modules"))
    names = words({"targets": targets}, "targets", "train.lora") if targets != "all-linear" else ()
    return Adapters(rank=rank, targets=names or ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"))


def _offload(train: Mapping[str, object]) -> tuple[str, ...]:
    names = words(train, "offload", "train")
    unknown = [name for name in names if name not in _OFFLOADS]
    if unknown:
        raise ConfigError(f"train.offload has {unknown[0]!r}, known: {', '.join(_OFFLOADS)}.")
    return names


def _graph(train: Mapping[str, object]) -> dict[str, Any]:
    kind = train.get("cuda_graph") or "none"
    if not isinstance(kind, str) or kind not in GRAPHS:
        raise ConfigError(f"train.cuda_graph is {kind!r}, known: {', '.join(GRAPHS)}.")
    share, experts = GRAPHS[kind]
    return {"replayed_launches": share, "replays_experts": experts}

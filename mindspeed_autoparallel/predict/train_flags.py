"""The flags that turn on the switches which computed costs rest on: the inverse of ``predict.megatron_arguments``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES
from mindspeed_autoparallel.errors import ConfigError

_Release = tuple[int, int]
_AFTER_0_12 = (0, 16)
"""First release of Megatron-LM read here that has ``--cuda-graph-impl``, four-bit and blockwise recipes, gathered mxfp8
parameters, moments in bf16 and hidden exchanges; 0.12 has none of them."""
_FOUR_BIT_GATHER = (0, 19)
_GRAPHS_OF_EXPERTS = (0, 18)
_NO_FUSED_LOSS = (0, 18)
"""From here on Megatron-LM refuses Transformer Engine's fused loss."""
_RECIPES = {
    "fp8": ("hybrid", "tensorwise"),
    "fp8_blockwise": ("e4m3", "blockwise"),
    "mxfp8": ("e4m3", "mxfp8"),
}
_NOT_OF_A_LAUNCH = frozenset(
    {
        *("gbs", "mbs", "stack", "software", "packing", "mean_document", "variable_seq", "own_masks"),
        *("loss_in_place", "routing_imbalance", "overlap_grad_reduce", "tp_comm_overlap"),
        *("recompute", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_per_pp_rank"),
    }
)
"""Keys that describe data and software, and those whose flags follow from the plan's layout and its recompute."""


def flags_of_switches(
    train: Mapping[str, object], *, on_ascend: bool, release: _Release
) -> tuple[list[str], tuple[str, ...]]:
    """Return the flags for the switches in ``train``, a request's section, and the keys for which the host has none.

    ``on_ascend``: the host is MindSpeed-LLM, otherwise Megatron-LM of ``release``. Raises ``ConfigError`` for a
    precision that the release cannot train in.
    """
    words: list[str] = []
    left: list[str] = []
    for key in sorted(train):
        value = train[key]
        if value is None or key in _NOT_OF_A_LAUNCH or key not in KNOWN["train"]:
            continue
        found = _flags(key, value, train, on_ascend, release)
        if found is None:
            left.append(key)
        else:
            words += [word for word in found if word not in words or not word.startswith("--")]
    return words, tuple(left)


def _flags(
    key: str, value: object, train: Mapping[str, object], on_ascend: bool, release: _Release
) -> list[str] | None:
    """Return the flags of one switch: nothing where the host does it anyway, ``None`` where it has no flag."""
    if key == "precision":
        return _precision(str(value), on_ascend, release)
    if key == "fp8_param_gather":
        return _gather(str(train.get("precision")), on_ascend, release) if value else []
    if key == "cuda_graph":
        return [] if value == "none" else None if on_ascend else _graph(str(value), "grouped_gemm" in train, release)
    if key == "attention":
        return _attention(str(value), on_ascend)
    if key in ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype"):
        form = str(value).removeprefix("torch.")
        known = form != "bf16" or on_ascend or release >= _AFTER_0_12
        return ["--use-precision-aware-optimizer", _spelt(key), form] if known else None
    if key == "optimizer_offload_fraction":
        return [_spelt(key), str(value)] if train.get("optimizer_cpu_offload") else []
    if key in _SWITCHES:
        only, words = _SWITCHES[key]
        if not value:
            return []
        return words if only is None or only == on_ascend else None
    if key in _OTHERS:
        return _OTHERS[key](value, on_ascend, release)
    return None


def _precision(precision: str, on_ascend: bool, release: _Release) -> list[str]:
    if precision in ("fp32", "float32"):
        return []
    if precision in ("fp16", "float16"):
        return ["--fp16"]
    if precision in ("nvfp4", "fp8_blockwise") and not on_ascend and release < _AFTER_0_12:
        raise ConfigError(f"train.precision {precision} needs Megatron-LM {_named(_AFTER_0_12)} or newer.")
    if precision == "nvfp4":
        return ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
    if precision not in _RECIPES:
        return ["--bf16"]
    form, recipe = _RECIPES[precision]
    return ["--bf16", "--fp8-format", form, "--fp8-recipe", recipe]


def _gather(precision: str, on_ascend: bool, release: _Release) -> list[str] | None:
    """Return the flags of parameters that are gathered in the recipe's form."""
    if precision == "nvfp4":
        return ["--fp4-param-gather"] if release >= _FOUR_BIT_GATHER else None
    if precision != "mxfp8" or on_ascend:
        return ["--fp8-param-gather"]
    return ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"] if release >= _AFTER_0_12 else None


def _graph(kind: str, experts: bool, release: _Release) -> list[str] | None:
    if release < _AFTER_0_12:
        return {"local": ["--enable-cuda-graph"], "transformer_engine": ["--external-cuda-graph"]}.get(kind)
    if experts and kind in ("local", "full_iteration") and release < _GRAPHS_OF_EXPERTS:
        return None
    if kind == "full_iteration":
        # Megatron refuses a graph that is left at every step to look for NaN.
        words = ["--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"]
        return [*words, "--no-check-for-nan-in-loss-and-grad"]
    return ["--cuda-graph-impl", kind]


def _attention(kind: str, on_ascend: bool) -> list[str]:
    if on_ascend:
        return ["--use-flash-attn"] if kind == "fused" else []
    return [] if kind == "fused" else ["--attention-backend", "unfused"]


def _named(release: _Release) -> str:
    return ".".join(map(str, release))


def _spelt(key: str) -> str:
    return "--" + key.replace("_", "-")


_SWITCHES: Mapping[str, tuple[bool | None, list[str]]] = {
    "grad_reduce_in_bf16": (None, ["--grad-reduce-in-bf16"]),
    "optimizer_cpu_offload": (False, ["--use-precision-aware-optimizer", "--optimizer-cpu-offload"]),
    "reuse_fp32_param": (True, ["--reuse-fp32-param"]),
    "grouped_gemm": (None, ["--moe-grouped-gemm"]),
    "fp8_dot_product_attention": (False, ["--fp8-dot-product-attention"]),
}
"""Switches that are off by default: the one host that has them, Ascend's or the other, and their flags."""


def _denied(*words: str) -> Callable[[object, bool, _Release], list[str] | None]:
    return lambda value, on_ascend, release: [] if value else list(words)


def _exchanges(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    if not value:
        return []
    return None if on_ascend or release < _AFTER_0_12 else ["--overlap-moe-expert-parallel-comm"]


def _swapped(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    names = value if isinstance(value, (list, tuple)) else [value]
    return [f"--{name}" for name in names] if on_ascend else None


def _extra(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    names = value if isinstance(value, (list, tuple)) else [value]
    return [word for name in names for word in f"--{name}".split("=")] if on_ascend else None


def _slices(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    if value == 1:
        return []
    return ["--output-layer-slice-num", str(value)] if on_ascend else None


def _adapters(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    if not on_ascend or not isinstance(value, Mapping):
        return None
    targets = value.get("targets") or ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return ["--lora-r", str(value.get("r", 8)), "--lora-target-modules", *map(str, targets)]


def _fused_loss(value: object, on_ascend: bool, release: _Release) -> list[str] | None:
    if not value:
        return []
    refused = on_ascend or release >= _NO_FUSED_LOSS
    return None if refused else ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]


_OTHERS: Mapping[str, Callable[[object, bool, _Release], list[str] | None]] = {
    "moe_a2a_overlap": _exchanges,
    "cross_entropy_fusion": _fused_loss,
    "gradient_accumulation_fusion": _denied("--no-gradient-accumulation-fusion"),
    "dropout": _denied("--attention-dropout", "0", "--hidden-dropout", "0"),
    "rope_fusion": _denied("--no-rope-fusion"),
    "bias_activation_fusion": _denied("--no-bias-swiglu-fusion"),
    "optimizer": lambda value, on_ascend, release: [] if value in ("adam", "adamw") else None,
    "cpu_offloading_num_layers": lambda value, on_ascend, release: [] if not value else None,
    "offload": _swapped,
    "recompute_extra": _extra,
    "loss_slices": _slices,
    "lora": _adapters,
    "task": lambda value, on_ascend, release: ["--stage", str(value)] if on_ascend else None,
}
assert not set(_OTHERS) & set(_SWITCHES) and OPERAND_BYTES.keys() == {*_RECIPES, "nvfp4"}

"""The flags that turn on the switches which computed costs rest on: the inverse of ``predict.megatron_arguments``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from mindspeed_autoparallel.cost.analytic.reading_train import state_type
from mindspeed_autoparallel.cost.analytic.request_keys import KNOWN
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES
from mindspeed_autoparallel.errors import ConfigError

_AFTER_0_12 = (0, 16)
"""First release of Megatron-LM read here that has ``--cuda-graph-impl``, four-bit and blockwise recipes, gathered mxfp8
parameters, moments in bf16 and hidden exchanges; 0.12 has none of them."""
_FOUR_BIT_GATHER = (0, 19)
_GRAPHS_OF_EXPERTS = (0, 18)
_NO_FUSED_LOSS = (0, 18)
"""From here on Megatron-LM refuses Transformer Engine's fused loss."""
_RECIPES = {"fp8": ("hybrid", "tensorwise"), "fp8_blockwise": ("e4m3", "blockwise"), "mxfp8": ("e4m3", "mxfp8")}
_NOT_OF_A_LAUNCH = frozenset(
    {
        *("gbs", "mbs", "stack", "software", "packing", "mean_document", "variable_seq", "own_masks"),
        *("loss_in_place", "routing_imbalance", "overlap_grad_reduce", "tp_comm_overlap"),
        *("recompute", "recompute_method", "recompute_num_layers", "recompute_modules", "recompute_per_pp_rank"),
    }
)
"""Keys that describe data and software, and those whose flags follow from the plan's layout and its recompute."""


class Host(NamedTuple):
    """Who trains: MindSpeed-LLM where ``on_ascend``, otherwise Megatron-LM of ``release``."""

    on_ascend: bool
    release: tuple[int, int]


def flags_of_switches(train: Mapping[str, object], host: Host) -> tuple[list[str], tuple[str, ...]]:
    """Return the flags for the switches in ``train``, a request's section, and the keys for which the host has none.

    Raises ``ConfigError`` for a precision that the release cannot train in.
    """
    words: list[str] = []
    left: list[str] = []
    for key in sorted(train):
        value = train[key]
        if value is None or key in _NOT_OF_A_LAUNCH or key not in KNOWN["train"]:
            continue
        found = _FLAGS[key](value, train, host) if key in _FLAGS else None
        if found is None:
            left.append(key)
        else:
            words += [word for word in found if word not in words or not word.startswith("--")]
    return words, tuple(left)


_Words = list[str] | None
"""Nothing where the host does it anyway, ``None`` where it has no flag."""
_Flags = Callable[[object, Mapping[str, object], Host], _Words]
"""Of a switch: its value, all switches, the host."""


def _precision(value: object, train: Mapping[str, object], host: Host) -> _Words:
    precision = str(value)
    if precision in ("fp32", "float32"):
        return []
    if precision in ("fp16", "float16"):
        return ["--fp16"]
    if precision in ("nvfp4", "fp8_blockwise") and not host.on_ascend and host.release < _AFTER_0_12:
        oldest = ".".join(map(str, _AFTER_0_12))
        raise ConfigError(f"train.precision {precision} needs Megatron-LM {oldest} or newer.")
    if precision == "nvfp4":
        return ["--bf16", "--fp4-format", "e2m1", "--fp4-recipe", "nvfp4"]
    if precision not in _RECIPES:
        return ["--bf16"]
    form, recipe = _RECIPES[precision]
    return ["--bf16", "--fp8-format", form, "--fp8-recipe", recipe]


def _gather(value: object, train: Mapping[str, object], host: Host) -> _Words:
    """Return the flags of parameters that are gathered in the recipe's form."""
    if not value:
        return []
    if train.get("precision") == "nvfp4":
        return ["--fp4-param-gather"] if host.release >= _FOUR_BIT_GATHER else None
    if train.get("precision") != "mxfp8" or host.on_ascend:
        return ["--fp8-param-gather"]
    return ["--fp8-param-gather", "--reuse-grad-buf-for-mxfp8-param-ag"] if host.release >= _AFTER_0_12 else None


def _graph(value: object, train: Mapping[str, object], host: Host) -> _Words:
    kind = str(value)
    if kind == "none":
        return []
    if host.on_ascend:
        return None
    if host.release < _AFTER_0_12:
        return {"local": ["--enable-cuda-graph"], "transformer_engine": ["--external-cuda-graph"]}.get(kind)
    if "grouped_gemm" in train and kind != "transformer_engine" and host.release < _GRAPHS_OF_EXPERTS:
        return None
    if kind == "full_iteration":
        # Megatron refuses a graph that is left at every step to look for NaN.
        words = ["--cuda-graph-impl", "local", "--cuda-graph-scope", "full_iteration"]
        return [*words, "--no-check-for-nan-in-loss-and-grad"]
    return ["--cuda-graph-impl", kind]


def _attention(value: object, train: Mapping[str, object], host: Host) -> _Words:
    if host.on_ascend:
        return ["--use-flash-attn"] if value == "fused" else []
    return [] if value == "fused" else ["--attention-backend", "unfused"]


def _fused_loss(value: object, train: Mapping[str, object], host: Host) -> _Words:
    if not value:
        return []
    refused = host.on_ascend or host.release >= _NO_FUSED_LOSS
    return None if refused else ["--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl", "te"]


def _hidden_exchanges(value: object, train: Mapping[str, object], host: Host) -> _Words:
    if not value:
        return []
    return None if host.on_ascend or host.release < _AFTER_0_12 else ["--overlap-moe-expert-parallel-comm"]


def _state_type(flag: str, forms: tuple[str, ...], newer: tuple[str, ...] = ()) -> _Flags:
    """Return the flags of a type that is not fp32; ``forms``: what every release takes, ``newer``: after 0.12, too."""

    def words(value: object, train: Mapping[str, object], host: Host) -> _Words:
        form = state_type(value)
        if form == "fp32":
            return []
        is_newer = not host.on_ascend and host.release >= _AFTER_0_12
        known = form in forms or (is_newer and form in newer)
        return ["--use-precision-aware-optimizer", flag, form] if known else None

    return words


def _offloaded_share(value: object, train: Mapping[str, object], host: Host) -> _Words:
    return ["--optimizer-offload-fraction", str(value)] if train.get("optimizer_cpu_offload") else []


def _on(*words: str, on_ascend: bool | None = None) -> _Flags:
    """Return the flags of a switch that is off by default. ``on_ascend``: which host alone has them; ``None``: both."""

    def flags(value: object, train: Mapping[str, object], host: Host) -> _Words:
        if not value:
            return []
        return list(words) if on_ascend in (None, host.on_ascend) else None

    return flags


def _off(*words: str) -> _Flags:
    """Return the flags that turn off a switch that is on by default."""
    return lambda value, train, host: [] if value else list(words)


def _only(*usual: object) -> _Flags:
    """Return no flags for the ``usual`` values, and for no other: nothing states them."""
    return lambda value, train, host: [] if value in usual else None


def _ascends(words: Callable[[object], list[str]]) -> _Flags:
    """Return the flags of a switch that MindSpeed alone has."""
    return lambda value, train, host: words(value) if host.on_ascend else None


def _loss_slices(value: object, train: Mapping[str, object], host: Host) -> _Words:
    if value == 1:
        return []
    return ["--output-layer-slice-num", str(value)] if host.on_ascend else None


def _names(value: object) -> list[object]:
    return [*value] if isinstance(value, (list, tuple)) else [value]


def _adapters(value: object) -> list[str]:
    given = value if isinstance(value, Mapping) else {}
    targets = given.get("targets") or ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
    return ["--lora-r", str(given.get("r", 8)), "--lora-target-modules", *map(str, targets)]


_FLAGS: Mapping[str, _Flags] = {
    "precision": _precision,
    "fp8_param_gather": _gather,
    "fp8_dot_product_attention": _on("--fp8-dot-product-attention", on_ascend=False),
    "grad_reduce_in_bf16": _on("--grad-reduce-in-bf16"),
    "main_params_dtype": _state_type("--main-params-dtype", ("fp16",)),
    "exp_avg_dtype": _state_type("--exp-avg-dtype", ("fp16", "fp8"), newer=("bf16",)),
    "exp_avg_sq_dtype": _state_type("--exp-avg-sq-dtype", ("fp16", "fp8"), newer=("bf16",)),
    "optimizer": _only("adam", "adamw"),
    "optimizer_cpu_offload": _on("--use-precision-aware-optimizer", "--optimizer-cpu-offload", on_ascend=False),
    "optimizer_offload_fraction": _offloaded_share,
    "cpu_offloading_num_layers": _only(0, False),
    "attention": _attention,
    "cross_entropy_fusion": _fused_loss,
    "cuda_graph": _graph,
    "grouped_gemm": _on("--moe-grouped-gemm"),
    "moe_a2a_overlap": _hidden_exchanges,
    "gradient_accumulation_fusion": _off("--no-gradient-accumulation-fusion"),
    "dropout": _off("--attention-dropout", "0", "--hidden-dropout", "0"),
    "rope_fusion": _off("--no-rope-fusion"),
    "bias_activation_fusion": _off("--no-bias-swiglu-fusion"),
    "reuse_fp32_param": _on("--reuse-fp32-param", on_ascend=True),
    "offload": _ascends(lambda value: [f"--{name}" for name in _names(value)]),
    "recompute_extra": _ascends(lambda value: [word for name in _names(value) for word in f"--{name}".split("=")]),
    "loss_slices": _loss_slices,
    "lora": _ascends(_adapters),
    "task": _ascends(lambda value: ["--stage", str(value)]),
}
assert OPERAND_BYTES.keys() == {*_RECIPES, "nvfp4"}

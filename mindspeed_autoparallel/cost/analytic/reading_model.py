"""Reads the ``model`` of a prediction request."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from mindspeed_autoparallel.cost.analytic.fields import counts, integer, is_list, number, optional_section, switch
from mindspeed_autoparallel.cost.analytic.model_shape import (
    Activation,
    Encoder,
    LatentAttention,
    LayerKind,
    LinearAttention,
    ModelShape,
    SparseAttention,
    StateSpace,
)
from mindspeed_autoparallel.cost.analytic.placement import PATTERN_SYMBOLS, layer_kinds
from mindspeed_autoparallel.errors import ConfigError

DEFAULT_VOCABULARY = 51200
TYPES = ("gpt", "moe", "hybrid", "mamba", "vlm")
_MOST_LAYERS = 10_000
_LEAST_CAPACITY = 0.01


def read_model(section: Mapping[str, object], noop_layers: int = 0) -> ModelShape:
    """Return the shape that ``section`` describes; ``num_layers`` counts ``noop_layers`` too.

    Raises ``ConfigError`` with the key, the value and the rule for impossible models.
    """
    kind = section.get("type", "moe" if section.get("num_experts") else "gpt")
    if kind not in TYPES:
        raise ConfigError(f"model.type is {kind!r}, must be one of {', '.join(TYPES)}.")
    hidden = integer(section, "hidden", None, "model")
    heads = integer(section, "heads", None, "model")
    kv_heads = integer(section, "kv_heads", heads, "model")
    head_size = integer(section, "head_size", 0, "model", 0)
    latent = _latent(section)
    if not head_size and not latent and hidden % heads:
        raise ConfigError(
            f"model.hidden {hidden} is not divisible by model.heads {heads}; model.head_size sets another width."
        )
    if heads % kv_heads:
        raise ConfigError(f"model.heads {heads} is not divisible by model.kv_heads {kv_heads}.")
    gated = bool(switch(section, "swiglu", False, "model"))
    # Megatron's own defaults: a gated layer has three matrices, each two thirds as wide, in steps of 64.
    ffn = integer(section, "ffn", int(4 * hidden * 2 / 3) // 64 * 64 if gated else 4 * hidden, "model")
    experts = integer(section, "num_experts", 0, "model", 0)
    if kind == "moe" and not experts:
        raise ConfigError("model.num_experts is missing for model.type moe.")
    topk = integer(section, "topk", 2, "model")
    if experts and topk > experts:
        raise ConfigError(f"model.topk {topk} is above model.num_experts {experts}.")
    sequence = integer(section, "seq", None, "model")
    layers = _layers(section, experts > 0, noop_layers)
    return ModelShape(
        num_layers=len(layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        ffn=ffn,
        sequence=sequence,
        vocabulary=integer(section, "vocab", DEFAULT_VOCABULARY, "model"),
        gated=gated,
        num_experts=experts,
        topk=topk if experts else 0,
        expert_ffn=integer(section, "moe_ffn", ffn, "model") if experts else 0,
        shared_ffn=integer(section, "shared_expert_ffn", 0, "model", 0) if experts else 0,
        head_size=head_size,
        tied=bool(section.get("tied_embeddings", not gated and not experts)),
        causal=bool(section.get("causal", True)),
        **(_window(section) | _activation(section) | _rare(section, experts)),
        expert_bias=bool(section.get("expert_bias", False)),
        expert_clamp=bool(section.get("expert_clamp", False)),
        layers=layers,
        mtp_layers=integer(section, "mtp_layers", 0, "model", 0),
        latent=latent,
        state_space=_state_space(section, layers),
        linear=_linear(section, layers),
        sparse=_sparse(section),
        encoder=_encoder(section, sequence),
        extra_norms=2 * bool(section.get("post_norm", False)),
        attended=number(section, "mean_seq", 0.0, "model", 0.0, math.inf),
        capacity_factor=_capacity(section) if experts else 0.0,
    )


def _rare(section: Mapping[str, object], experts: int) -> dict[str, Any]:
    """Return the fields of experts in a latent space, of attention over depth, and of biases if they are stated."""
    return {
        "expert_hidden": integer(section, "moe_latent", 0, "model", 0) if experts else 0,
        "residual_blocks": number(section, "residual_blocks", 0.0, "model", 0.0, _MOST_LAYERS),
        "linear_bias": switch(section, "linear_bias", None, "model"),
    }


def _layers(section: Mapping[str, object], experts: bool, noop_layers: int) -> tuple[LayerKind, ...]:
    pattern = section.get("layer_pattern") or ""
    if pattern and noop_layers:
        raise ConfigError("parallel.noop_layers and model.layer_pattern: a pattern has no layers that do nothing.")
    if pattern:
        symbols = str(pattern).split("/")[0].replace("|", "")
        if not symbols or set(symbols) - PATTERN_SYMBOLS:
            raise ConfigError(
                f"model.layer_pattern {pattern!r} must have one of {' '.join(sorted(PATTERN_SYMBOLS))} per layer."
            )
        total = integer(section, "num_layers", len(symbols), "model")
        if total != len(symbols):
            raise ConfigError(f"model.layer_pattern has {len(symbols)} layers, model.num_layers is {total}.")
        return layer_kinds(total, dense_first=0, experts=experts, pattern=symbols)
    total = integer(section, "num_layers", None, "model") - noop_layers
    if total < 1:
        raise ConfigError(f"{noop_layers} of {section.get('num_layers')} layers are no-op layers; none is left.")
    if total > _MOST_LAYERS:
        raise ConfigError(f"model.num_layers is {total}, must be at most {_MOST_LAYERS}.")
    if section.get("type") == "mamba":
        return (LayerKind("mamba", "none"),) * total
    dense = integer(section, "num_dense_layers", 0, "model", 0)
    frequency = _frequency(section.get("moe_layer_freq"), total)
    return layer_kinds(total, dense_first=dense, experts=experts, frequency=frequency)


def _frequency(value: Any, total: int) -> int | Sequence[int]:
    """Return Megatron's ``--moe-layer-freq``: every how many layers, or 0 and 1 per layer (``([0]*3+[1]*58)``)."""
    if value in (None, "", "-1", -1, 0, "0"):
        return 1
    text = str(value)
    if re.fullmatch(r"\d+", text):
        return int(text)
    listed = list(value) if is_list(value) else _frequency_list(text)
    if len(listed) != total or set(listed) - {0, 1}:
        raise ConfigError(f"model.moe_layer_freq {value!r} must be a number, or 0 or 1 for each of {total} layers.")
    return listed


def _frequency_list(text: str) -> list[int]:
    """Evaluate a sum of repeated lists, as ``([0]*3+[1]*58)``; nothing else is evaluated."""
    result: list[int] = []
    for part in text.strip("() ").split("+"):
        found = re.fullmatch(r"\(?\s*(\[[01,\s]*\])\s*(?:\*\s*(\d+))?\s*\)?", part.strip())
        if not found or int(found.group(2) or 1) > _MOST_LAYERS:
            raise ConfigError(
                f"model.moe_layer_freq {text!r} must be a number or lists of 0 and 1, such as [0]*3+[1]*58."
            )
        result += ast.literal_eval(found.group(1)) * int(found.group(2) or 1)
    return result


def _window(section: Mapping[str, object]) -> dict[str, Any]:
    """Return the window and the share of the layers that have it: all of them if only the size is given."""
    size = integer(section, "window", 0, "model", 0)
    share = number(section, "windowed_share", 1.0 if size else 0.0, "model", 0.0, 1.0)
    if share and not size:
        raise ConfigError(f"model.windowed_share is {share!r}, but model.window is missing.")
    return {"window": size, "windowed_share": share}


def _activation(section: Mapping[str, object]) -> dict[str, Any]:
    """Return how the activation function runs, whether attention has a gate, and whether logits are capped."""
    name = section.get("activation") or "fused"
    if not isinstance(name, str) or name not in get_args(Activation):
        raise ConfigError(f"model.activation is {name!r}, must be one of {', '.join(get_args(Activation))}.")
    switches = {"attention_gate": "attention_gate", "capped_logits": "logit_softcap"}
    return {"activation": name} | {key: bool(switch(section, word, False, "model")) for key, word in switches.items()}


def _latent(section: Mapping[str, object]) -> LatentAttention | None:
    values = optional_section(section, "mla", "model")
    if values is None:
        return None
    if values.get("qk_nope_head_dim") is None:
        raise ConfigError("model.mla.qk_nope_head_dim is missing: latent attention has no size without it.")
    return LatentAttention(
        query_rank=integer(values, "q_lora_rank", 0, "model.mla", 0),
        key_value_rank=integer(values, "kv_lora_rank", None, "model.mla"),
        nope_size=integer(values, "qk_nope_head_dim", None, "model.mla"),
        rope_size=integer(values, "qk_rope_head_dim", 64, "model.mla", 0),
        value_size=integer(values, "v_head_dim", 128, "model.mla"),
    )


def _state_space(section: Mapping[str, object], layers: Sequence[LayerKind]) -> StateSpace | None:
    if not any(layer.mixer == "mamba" for layer in layers):
        _refuse_without_layers(section, "mamba", "M")
        return None
    values = optional_section(section, "mamba", "model") or {}
    # Megatron's own defaults: twice the hidden size in heads of 64, states of 128, 8 groups.
    return StateSpace(
        heads=integer(values, "num_heads", max(1, 2 * integer(section, "hidden", None, "model") // 64), "model.mamba"),
        head_size=integer(values, "head_dim", 64, "model.mamba"),
        state_size=integer(values, "state_dim", 128, "model.mamba"),
        groups=integer(values, "num_groups", 8, "model.mamba"),
    )


def _refuse_without_layers(section: Mapping[str, object], key: str, symbol: str) -> None:
    if section.get(key):
        raise ConfigError(
            f"model.{key} is given, but no layer has it: list these layers in model.layer_pattern ({symbol}, "
            "Megatron's hybrid pattern)."
        )


def _linear(section: Mapping[str, object], layers: Sequence[LayerKind]) -> LinearAttention | None:
    if not any(layer.mixer == "linear" for layer in layers):
        _refuse_without_layers(section, "linear_attention", "G")
        return None
    values = optional_section(section, "linear_attention", "model")
    if values is None:
        raise ConfigError("model.layer_pattern has G layers, but model.linear_attention is missing.")
    return LinearAttention(
        key_heads=integer(values, "num_key_heads", None, "model.linear_attention"),
        value_heads=integer(values, "num_value_heads", None, "model.linear_attention"),
        key_size=integer(values, "key_head_dim", 128, "model.linear_attention"),
        value_size=integer(values, "value_head_dim", 128, "model.linear_attention"),
        decay_rank=integer(values, "decay_rank", 0, "model.linear_attention", 0),
        gate_rank=integer(values, "gate_rank", 0, "model.linear_attention", 0),
    )


def _sparse(section: Mapping[str, object]) -> SparseAttention | None:
    values = optional_section(section, "dsa", "model")
    if values is None:
        return None
    # By default the sizes of DeepSeek-V3.2's indexer.
    return SparseAttention(
        heads=integer(values, "heads", 64, "model.dsa"),
        head_size=integer(values, "head_dim", 128, "model.dsa"),
        topk=integer(values, "topk", 2048, "model.dsa"),
        fused=bool(switch(values, "fused", True, "model.dsa")),
    )


def _capacity(section: Mapping[str, object]) -> float:
    """Return the rows that an expert takes, relative to its balanced share; 0 if no token is dropped."""
    factor = number(section, "capacity_factor", 0.0, "model", 0.0, 1e3)
    if 0 < factor < _LEAST_CAPACITY:
        raise ConfigError(
            f"model.capacity_factor is {factor:g}, must be 0 (no token is dropped) or at least {_LEAST_CAPACITY:g}."
        )
    return factor


def _encoder(section: Mapping[str, object], sequence: int) -> Encoder | None:
    values = optional_section(section, "vision_encoder", "model")
    if values is None:
        return None

    def size(key: str, *others: str) -> int:
        for name in (key, *others):
            if values.get(name) is not None:
                return integer(values, name, None, "model.vision_encoder")
        raise ConfigError(f"model.vision_encoder.{key} is missing.")

    hidden = size("hidden", "hidden_size")
    return Encoder(
        num_layers=size("num_layers"),
        hidden=hidden,
        heads=size("heads", "num_attention_heads"),
        ffn=size("ffn", "ffn_hidden_size") if {"ffn", "ffn_hidden_size"} & set(values) else 4 * hidden,
        gated=bool(values.get("swiglu", False)),
        # Vision transformers of Qwen's kind merge four of their tokens into one of the decoder's.
        tokens=integer(values, "tokens", 4 * sequence // 2, "model.vision_encoder"),
        frozen=bool(values.get("frozen", values.get("freeze", False))),
        layers_per_stage=counts(values, "pipeline_num_layers", "model.vision_encoder"),
    )

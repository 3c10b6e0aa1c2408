"""Turns a Hugging Face ``config.json`` of a text decoder into the ``model`` of a prediction request.

Keys are those of the families' configuration classes in transformers; sizes that a family keeps in its class and not in
the file are named here with their class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.predict.hugging_face_values import HuggingFaceValues

Section = dict[str, Any]


def decoder_of_config(config: Mapping[str, object], where: str) -> Section:
    """Return the request's ``model`` without ``seq``, which no config.json has.

    Raises ``ConfigError`` naming the family or the key. Models of several modules: ``hugging_face_modules``.
    """
    family = config.get("model_type")
    read = _FAMILIES.get(family) if isinstance(family, str) else None
    if read is None:
        raise ConfigError(f"{where}: model_type {shown(family)} is not known; known: {', '.join(sorted(_FAMILIES))}.")
    return {key: value for key, value in read(HuggingFaceValues(config, where)).items() if value is not None}


def is_decoder(family: object) -> bool:
    """Return whether ``model_type`` names a text decoder that is known."""
    return isinstance(family, str) and family in _FAMILIES


def _widths(config: HuggingFaceValues) -> Section:
    return {
        "hidden": config.size("hidden_size"),
        "heads": config.size("num_attention_heads"),
        "kv_heads": config.optional("num_key_value_heads"),
        "vocab": config.size("vocab_size"),
        "swiglu": True,
        "tied_embeddings": config.switch("tie_word_embeddings"),
    }


def _dense(config: HuggingFaceValues) -> Section:
    return {
        **_widths(config),
        "type": "gpt",
        "num_layers": config.size("num_hidden_layers"),
        "head_size": config.optional("head_dim"),
        "ffn": config.size("intermediate_size"),
    }


def _windowed(config: HuggingFaceValues, layers: int) -> Section:
    """Return window and share of the layers that have it; nothing where every token attends to all before it."""
    kinds = config.texts("layer_types")
    window = config.optional("sliding_window")
    share = kinds.count("sliding_attention") / layers if kinds else 1.0
    return {"window": window, "windowed_share": share} if window and share else {}


def _mistral(config: HuggingFaceValues) -> Section:
    model = _dense(config)
    return {**model, **_windowed(config, model["num_layers"])}


def _qwen2(config: HuggingFaceValues) -> Section:
    return _mistral(config) if config.switch("use_sliding_window") else _dense(config)


def _qwen3(config: HuggingFaceValues) -> Section:
    # Qwen3Config keeps heads of 128 for any hidden size.
    return {**_qwen2(config), "head_size": config.size("head_dim", 128), "qk_norm": True}


def _experts(config: HuggingFaceValues, width: str, shared: int = 0) -> Section:
    # Three names for one number: newer releases of transformers write another one than the models were published with.
    return {
        "type": "moe",
        "num_experts": config.first("num_experts", "num_local_experts", "n_routed_experts"),
        "topk": config.first("num_experts_per_tok", "num_experts_per_token"),
        "moe_ffn": config.size(width),
        "shared_expert_ffn": shared or None,
    }


def _mixtral(config: HuggingFaceValues) -> Section:
    return {**_mistral(config), **_experts(config, "intermediate_size")}


def _qwen2_moe(config: HuggingFaceValues) -> Section:
    shared = config.size("shared_expert_intermediate_size")
    return {**_qwen2(config), **_experts(config, "moe_intermediate_size", shared)}


def _qwen3_moe(config: HuggingFaceValues) -> Section:
    return {**_qwen3(config), **_experts(config, "moe_intermediate_size")}


def _qwen3_5(config: HuggingFaceValues) -> Section:
    """Return layers of gated delta nets and, by default every fourth, of gated attention: two symbols for each."""
    experts, layers = config.optional("num_experts"), config.size("num_hidden_layers")
    every = config.size("full_attention_interval", 4)
    kinds = config.texts("layer_types") or [
        "linear_attention" if (number + 1) % every else "full_attention" for number in range(layers)
    ]
    shared = config.size("shared_expert_intermediate_size", 0, 0)
    mlp = _experts(config, "moe_intermediate_size", shared) if experts else {"ffn": config.size("intermediate_size")}
    return {
        **_widths(config),
        "type": "moe" if experts else "gpt",
        "num_layers": 2 * layers,
        "layer_pattern": "".join(("G" if kind == "linear_attention" else "*") + "-E"[bool(experts)] for kind in kinds),
        "head_size": config.size("head_dim", 256),
        "attention_gate": True,
        "qk_norm": True,
        "linear_attention": {
            "num_key_heads": config.size("linear_num_key_heads", 16),
            "num_value_heads": config.size("linear_num_value_heads", 32),
            "key_head_dim": config.size("linear_key_head_dim", 128),
            "value_head_dim": config.size("linear_value_head_dim", 128),
        },
        **mlp,
    }


def _mimo_v2(config: HuggingFaceValues) -> Section:
    """Return attention whose values are narrower than its keys as heads of the mean width: as many parameters and
    operations. Layers with a window have key-value heads of their own number, which is taken for all."""
    model = _dense(config)
    windowed, routed = config.numbers("hybrid_layer_pattern"), config.numbers("moe_layer_freq")
    width = config.size("head_dim", model["hidden"] // model["heads"])
    window = config.optional("sliding_window")
    return {
        **model,
        **_experts(config, "moe_intermediate_size"),
        "head_size": (width + config.size("v_head_dim", width)) // 2,
        "kv_heads": config.optional("swa_num_key_value_heads") or model["kv_heads"],
        "moe_layer_freq": routed or None,
        "window": window,
        "windowed_share": sum(windowed) / len(windowed) if windowed and window else None,
    }


def _gpt_oss(config: HuggingFaceValues) -> Section:
    return {
        **_mistral(config),
        **_experts(config, "intermediate_size"),
        "head_size": config.size("head_dim", 64),
        "expert_bias": True,
        "expert_clamp": True,
    }


def _dense_first(config: HuggingFaceValues) -> Section:
    """Return experts behind leading dense layers, and layers that predict further tokens."""
    width = config.size("moe_intermediate_size")
    shared = config.size("n_shared_experts", 0, 0) * width
    return {
        **_experts(config, "moe_intermediate_size", shared),
        "num_dense_layers": config.optional("first_k_dense_replace"),
        "mtp_layers": config.optional("num_nextn_predict_layers"),
    }


def _glm4_moe(config: HuggingFaceValues) -> Section:
    return {**_dense(config), **_dense_first(config), "qk_norm": config.switch("use_qk_norm") or None}


def _deepseek(config: HuggingFaceValues) -> Section:
    latent = {
        "q_lora_rank": config.size("q_lora_rank", 0, 0),
        "kv_lora_rank": config.size("kv_lora_rank"),
        "qk_nope_head_dim": config.size("qk_nope_head_dim"),
        "qk_rope_head_dim": config.size("qk_rope_head_dim"),
        "v_head_dim": config.size("v_head_dim"),
    }
    # Latent attention has a key and value of its own per head; head_dim of newer files is the rotated part's.
    return {**_dense(config), **_dense_first(config), "kv_heads": None, "head_size": None, "mla": latent}


def _kimi_linear(config: HuggingFaceValues) -> Section:
    """Return layers of Kimi Delta Attention and of latent attention without positions, two symbols each; Kimi K3's
    experts work in a latent space, and its layers mix earlier blocks' outputs into their input."""
    layers, dense = config.size("num_hidden_layers"), config.size("first_k_dense_replace", 0, 0)
    linear = config.inner("linear_attn_config")
    kda, heads = set(linear.numbers("kda_layers")), linear.size("num_heads")
    block, head = config.size("attn_res_block_size", 0, 0), linear.size("head_dim")
    widths = [2 + number // block for number in range(layers)] if block else []
    model = _deepseek(config)
    return {
        **model,
        "num_layers": 2 * layers,
        "num_dense_layers": None,
        "layer_pattern": "".join(
            ("G" if number + 1 in kda else "*") + ("E" if number >= dense else "-") for number in range(layers)
        ),
        "attention_gate": config.switch("mla_use_output_gate") or None,
        "shared_expert_ffn": config.first("num_shared_experts", "n_shared_experts") * model["moe_ffn"],
        "moe_latent": config.optional("routed_expert_hidden_size"),
        "residual_blocks": sum(widths) / layers if widths else None,
        "linear_attention": {
            "num_key_heads": heads,
            "num_value_heads": heads,
            "key_head_dim": head,
            "value_head_dim": head,
            "decay_rank": head,
            "gate_rank": 0 if linear.switch("use_full_rank_gate") else head,
        },
    }


def _moss_tts(config: HuggingFaceValues) -> Section:
    """Return a Qwen3 with further tables and heads, one pair for each code of a position: their words are counted with
    the text's, as parameters and logits are."""
    model = _qwen3(config.inner("language_config"))
    codes = config.size("n_vq", 32) * (config.size("audio_vocab_size", 1024) + 1)
    return {**model, "vocab": model["vocab"] + codes, "tied_embeddings": False}


_NEMOTRON_LAYERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}


def _nemotron_h(config: HuggingFaceValues) -> Section:
    """Return one mixer or one MLP a layer, as ``hybrid_override_pattern`` or ``layers_block_type`` lists them; MLPs
    have a squared ReLU and no gate."""
    pattern = config.text("hybrid_override_pattern")
    pattern = pattern or "".join(_NEMOTRON_LAYERS.get(kind, kind) for kind in config.texts("layers_block_type"))
    experts: Section = {}
    if "E" in pattern:
        shared = config.size("n_shared_experts", 1, 0) * config.size("moe_shared_expert_intermediate_size", 0, 0)
        experts = _experts(config, "moe_intermediate_size", shared)
        experts["moe_latent"] = config.optional("moe_latent_size")
    return {
        **_widths(config),
        "type": "moe" if experts else "hybrid",
        "num_layers": len(pattern),
        "layer_pattern": pattern,
        "head_size": config.size("head_dim", 128),
        "ffn": config.size("intermediate_size"),
        "swiglu": False,
        "linear_bias": config.switch("mlp_bias"),
        "mamba": {
            "num_heads": config.size("mamba_num_heads", 128),
            "head_dim": config.size("mamba_head_dim", 64),
            "state_dim": config.size("ssm_state_size", 128),
            "num_groups": config.size("n_groups", 8),
        },
        **experts,
    }


_FAMILIES: Mapping[str, Callable[[HuggingFaceValues], Section]] = {
    "llama": _dense,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "qwen3_5_text": _qwen3_5,
    "qwen3_5_moe_text": _qwen3_5,
    "mimo_v2": _mimo_v2,
    "kimi_linear": _kimi_linear,
    "moss_tts_delay": _moss_tts,
    "nemotron_h": _nemotron_h,
}

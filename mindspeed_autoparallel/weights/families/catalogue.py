"""The tables of a model: one record for each language model and each kind of encoder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from mindspeed_autoparallel.weights.families import sizes


@dataclass(frozen=True, kw_only=True)
class Family:
    """A stack of layers. ``blocks``: tables of each layer. ``always``: conditions that every model of the family meets.

    ``by_key``: a key of config.json (``key`` or ``key=default``) -> conditions that hold where its value is true.
    ``rename``: replacements in the tables' Hugging Face names, in this order. ``keys``: symbols read from other keys
    than usual.
    """

    blocks: tuple[str, ...]
    first: str
    last: str
    always: frozenset[str] = frozenset()
    by_key: Mapping[str, str] = field(default_factory=dict)
    rename: tuple[tuple[str, str], ...] = ()
    keys: Mapping[str, str] = field(default_factory=dict)
    layer: str = "model.layers.{n}."
    target_layer: str = "decoder.layers.{n}."
    multi_token: str = ""
    """Table of the layers that predict a further token, if the family may have them."""
    multi_token_layer: str = "model.layers.{m}."
    copies: tuple[tuple[str, str], ...] = ()
    """Hugging Face names under which the last layers repeat a tensor -> the tensor they repeat."""


_DENSE = Family(blocks=("norms", "attention", "dense"), first="embedding", last="output", keys=sizes.TEXT_KEYS)
_EXPERTS = replace(_DENSE, blocks=("norms", "attention", "dense", "experts"), always=frozenset({"each"}))
_BIASES = {"attention_bias": "qkv_bias o_bias", "mlp_bias": "mlp_bias"}
_QWEN_SHARED = (("mlp.shared_experts", "mlp.shared_expert"),)
_COPIES = (
    ("model.layers.{m}.embed_tokens.weight", "model.embed_tokens.weight"),
    ("model.layers.{m}.shared_head.head.weight", "lm_head.weight"),
)
_LATENT = replace(
    _EXPERTS,
    blocks=("norms", "latent_attention", "dense", "experts"),
    always=frozenset({"each", "latent"}),
    by_key={"q_lora_rank": "q_lora", "n_shared_experts": "shared"},
)
_QWEN_LINEAR = replace(
    _DENSE,
    blocks=("norms", "gated_attention", "delta_attention", "dense"),
    multi_token="multi_token_qwen",
    multi_token_layer="mtp.layers.{n}.",
)


def _with(family: Family, *words: str, **changes: object) -> Family:
    return replace(family, always=family.always | set(words), **changes)  # type: ignore[arg-type]  # fields by name


TEXT_FAMILIES: dict[str, Family] = {
    "llama": replace(_DENSE, by_key=_BIASES),
    "mistral": _DENSE,
    "qwen2": _with(_DENSE, "qkv_bias"),
    "qwen3": _with(_DENSE, "qk_norm", by_key=_BIASES),
    "seed_oss": replace(
        _DENSE, by_key={"attention_bias=true": "qkv_bias", "attention_out_bias": "o_bias", "mlp_bias": "mlp_bias"}
    ),
    "mixtral": replace(
        _EXPERTS,
        rename=(
            ("mlp.experts", "block_sparse_moe.experts"),
            ("mlp.gate.", "block_sparse_moe.gate."),
            ("gate_proj", "w1"),
            ("up_proj", "w3"),
            ("down_proj", "w2"),
        ),
        keys={**sizes.TEXT_KEYS, "expert_ffn": "intermediate_size"},
    ),
    "qwen2_moe": _with(_EXPERTS, "shared", "shared_gate", by_key={"qkv_bias=true": "qkv_bias"}, rename=_QWEN_SHARED),
    "qwen3_moe": _with(_EXPERTS, "qk_norm", by_key=_BIASES),
    "deepseek_v2": _LATENT,
    "deepseek_v3": _with(_LATENT, "balance_bias", multi_token="multi_token", copies=_COPIES),
    "glm4_moe": _with(
        _EXPERTS,
        "balance_bias",
        by_key={"attention_bias": "qkv_bias", "use_qk_norm": "qk_norm", "n_shared_experts": "shared"},
        multi_token="multi_token",
        copies=_COPIES,
    ),
    "gemma2": replace(
        _DENSE, blocks=("sandwich_norms", "attention", "dense"), by_key={"attention_bias": "qkv_bias o_bias"}
    ),
    "gemma3_text": replace(
        _with(_DENSE, "qk_norm"),
        blocks=("sandwich_norms", "attention", "dense"),
        by_key={"attention_bias": "qkv_bias o_bias"},
    ),
    "gpt_oss": Family(
        blocks=("norms", "attention", "experts"),
        first="embedding",
        last="output",
        always=frozenset({"transposed", "pairs", "router_bias", "sinks"}),
        by_key={"attention_bias=true": "qkv_bias o_bias"},
        rename=(("mlp.gate.", "mlp.router."),),
        keys={**sizes.TEXT_KEYS, "expert_ffn": "intermediate_size"},
    ),
    "llama4_text": replace(
        _DENSE,
        blocks=("norms", "attention", "dense", "experts"),
        always=frozenset({"transposed", "shared"}),
        by_key={"attention_bias": "qkv_bias o_bias"},
        rename=(
            ("mlp.gate.", "feed_forward.router."),
            ("mlp.shared_experts", "feed_forward.shared_expert"),
            ("mlp.", "feed_forward."),
        ),
        keys={
            **sizes.TEXT_KEYS,
            "expert_ffn": "intermediate_size",
            "shared_ffn": "intermediate_size",
            "ffn": "intermediate_size_mlp",
        },
    ),
    "qwen3_next": _with(
        _QWEN_LINEAR,
        "each",
        "shared",
        "shared_gate",
        "joint_projection",
        blocks=(*_QWEN_LINEAR.blocks, "experts"),
        rename=_QWEN_SHARED,
    ),
    "qwen3_5_text": _QWEN_LINEAR,
    "qwen3_5_moe_text": _with(
        _QWEN_LINEAR, "stacked", "shared", "shared_gate", blocks=(*_QWEN_LINEAR.blocks, "experts"), rename=_QWEN_SHARED
    ),
}
TEXT_FAMILIES |= {
    "kimi_k2": TEXT_FAMILIES["deepseek_v3"],
    "qwen3_vl_text": TEXT_FAMILIES["qwen3"],
    "qwen3_vl_moe_text": replace(
        TEXT_FAMILIES["qwen3_moe"], always=TEXT_FAMILIES["qwen3_moe"].always - {"each"} | {"transposed"}
    ),
}

_QWEN2_VISION = Family(
    blocks=("qwen_vision_layer",),
    first="qwen_vision_first",
    last="qwen_vision_last",
    layer="visual.blocks.{n}.",
    target_layer="image_encoder.encoder.blocks.layers.{n}.",
    keys=sizes.QWEN_VISION_KEYS,
)
_QWEN3_VISION = _with(
    _QWEN2_VISION,
    "layer_norm",
    "positions",
    rename=(
        ("mlp.fc", "mlp.linear_fc"),
        ("merger.ln_q", "merger.norm"),
        ("merger.mlp.0", "merger.linear_fc1"),
        ("merger.mlp.2", "merger.linear_fc2"),
    ),
)
_INTERN_VISION = Family(
    blocks=("intern_vision_layer",),
    first="intern_vision_first",
    last="intern_vision_last",
    by_key={
        "attention_bias": "qkv_bias",
        "use_qk_norm": "qk_norm",
        "use_absolute_position_embeddings=true": "positions",
    },
    always=frozenset({"layer_norm"}),
    layer="vision_tower.encoder.layer.{n}.",
    target_layer="image_encoder.encoder.encoder.layers.{n}.",
    keys=sizes.INTERN_VISION_KEYS,
)
_QWEN_AUDIO = Family(
    blocks=("qwen_audio_layer",),
    first="qwen_audio_first",
    last="qwen_audio_last",
    layer="audio_tower.layers.{n}.",
    target_layer="audio_encoder.encoder.blocks.layers.{n}.",
    keys=sizes.QWEN_AUDIO_KEYS,
)


@dataclass(frozen=True, kw_only=True)
class Composite:
    """A model of several modules. ``text``: its language model; empty if ``text_config`` names it.

    ``left_out``: prefixes of Hugging Face names of parts that are copied from the original on conversion back.
    """

    text: str = ""
    vision: Family | None = None
    audio: Family | None = None
    left_out: tuple[str, ...] = ()


_EARLIER_QWEN_KEYS = {**sizes.QWEN_VISION_KEYS, "width": "embed_dim", "ffn": "ffn_of_ratio"}
_TOWERS = ("vision_tower.", "vision_model.", "multi_modal_projector.")
COMPOSITES: dict[str, Composite] = {
    "qwen2_vl": Composite(text="qwen2", vision=_with(_QWEN2_VISION, "layer_norm", keys=_EARLIER_QWEN_KEYS)),
    "qwen2_5_vl": Composite(text="qwen2", vision=_with(_QWEN2_VISION, "gated")),
    "qwen2_5_omni": Composite(
        text="qwen2",
        vision=_with(_QWEN2_VISION, "gated", "separate"),
        audio=_QWEN_AUDIO,
        left_out=("talker.", "token2wav."),
    ),
    "qwen3_vl": Composite(text="qwen3_vl_text", vision=_QWEN3_VISION),
    "qwen3_vl_moe": Composite(text="qwen3_vl_moe_text", vision=_QWEN3_VISION),
    "qwen3_5": Composite(text="qwen3_5_text", vision=_QWEN3_VISION),
    "qwen3_5_moe": Composite(text="qwen3_5_moe_text", vision=_QWEN3_VISION),
    "internvl": Composite(vision=_INTERN_VISION),
    "gemma3": Composite(text="gemma3_text", left_out=_TOWERS),
    "llama4": Composite(text="llama4_text", left_out=_TOWERS),
    "mistral3": Composite(left_out=_TOWERS),
}
SUPPORTED = (*COMPOSITES, *TEXT_FAMILIES)

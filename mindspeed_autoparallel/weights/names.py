"""The table of names: Hugging Face tensors and the Megatron tensor they make, one rule each.

``{n}`` stands for the layer. Sources are written in the classic form (``visual.*``, ``model.*``); newer releases of
transformers nest them (``model.visual.*``, ``model.language_model.*``) and Omni puts ``thinker.`` in front.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.weights.architecture import AUDIO, TEXT, VISION, Architecture

# How sources make the target.
COPY = "copy"  # one source, as it is
QKV = "qkv"  # q, k, v -> for every query group: its queries, key, value
QKV_WITHOUT_KEY = "qkv without key"  # q, v -> the same with zeros for the key (bias of the audio tower)
FUSED_QKV = "fused qkv"  # one source, all queries, all keys, all values -> by query group
GATED = "gated"  # gate, up -> gate rows then up rows

# How tensor parallelism cuts the target.
WHOLE = "whole"
ROWS = "rows"
COLUMNS = "columns"
GATED_ROWS = "gated rows"  # rows of each half
VOCABULARY = "vocabulary"  # rows, padded

FIRST, LAYER, LAST = "first", "layer", "last"


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One tensor (of every layer, where ``place`` is ``layer``; else in the first or last chunk of its module)."""

    module: str
    place: str
    target: str
    sources: tuple[str, ...]
    combine: str = COPY
    split: str = WHOLE
    optional: bool = False
    kept_from_original: bool = False
    """On the way to Hugging Face, taken from the original where training has no such parameter."""


def rules_for(architecture: Architecture) -> tuple[Rule, ...]:
    """Return all rules of the family, in the order in which tensors are written."""
    if architecture.family in ("llama", "qwen2"):
        return _text_rules(target_prefix="")
    vision = _vision_rules(gated=architecture.family != "qwen2_vl", separate_qkv=architecture.family == "qwen2_5_omni")
    audio = _audio_rules() if AUDIO in architecture.modules else ()
    return vision + audio + _text_rules(target_prefix="text_decoder.")


def _linear(rule: Rule, split: str) -> tuple[Rule, Rule]:
    """Return weight and bias of one linear layer. A bias that is added after the reduction is not cut."""
    bias_split = WHOLE if split == COLUMNS else split
    weight, bias = (
        replace(rule, target=rule.target + end, sources=tuple(source + end for source in rule.sources))
        for end in (".weight", ".bias")
    )
    return replace(weight, split=split), replace(bias, split=bias_split, optional=True)


def _vision_rules(*, gated: bool, separate_qkv: bool) -> tuple[Rule, ...]:
    def rule(place: str, target: str, *sources: str, combine: str = COPY) -> Rule:
        return Rule(module=VISION, place=place, target=target, sources=sources, combine=combine)

    here, there = "image_encoder.encoder.blocks.layers.{n}.", "visual.blocks.{n}."
    rules = [
        *_linear(rule(FIRST, "image_encoder.encoder.patch_embed.proj", "visual.patch_embed.proj"), WHOLE),
        *_linear(rule(LAYER, here + "input_layernorm", there + "norm1"), WHOLE),
    ]
    qkv = (
        rule(LAYER, here + "self_attention.linear_qkv", *(there + f"attn.{x}" for x in "qkv"), combine=QKV)
        if separate_qkv
        else rule(LAYER, here + "self_attention.linear_qkv", there + "attn.qkv", combine=FUSED_QKV)
    )
    rules += [
        *_linear(qkv, ROWS),
        *_linear(rule(LAYER, here + "self_attention.linear_proj", there + "attn.proj"), COLUMNS),
        *_linear(rule(LAYER, here + "pre_mlp_layernorm", there + "norm2"), WHOLE),
    ]
    if gated:
        gate_up = rule(LAYER, here + "mlp.linear_fc1", there + "mlp.gate_proj", there + "mlp.up_proj", combine=GATED)
        rules += _linear(gate_up, GATED_ROWS)
        rules += _linear(rule(LAYER, here + "mlp.linear_fc2", there + "mlp.down_proj"), COLUMNS)
    else:
        rules += _linear(rule(LAYER, here + "mlp.linear_fc1", there + "mlp.fc1"), ROWS)
        rules += _linear(rule(LAYER, here + "mlp.linear_fc2", there + "mlp.fc2"), COLUMNS)
    return (
        *rules,
        *_linear(rule(LAST, "image_encoder.projector.layernorm", "visual.merger.ln_q"), WHOLE),
        *_linear(rule(LAST, "image_encoder.projector.encoder.linear_fc1", "visual.merger.mlp.0"), ROWS),
        *_linear(rule(LAST, "image_encoder.projector.encoder.linear_fc2", "visual.merger.mlp.2"), COLUMNS),
    )


def _audio_rules() -> tuple[Rule, ...]:
    def rule(place: str, target: str, *sources: str, combine: str = COPY) -> Rule:
        return Rule(module=AUDIO, place=place, target=target, sources=sources, combine=combine)

    here, there = "audio_encoder.encoder.blocks.layers.{n}.", "audio_tower.layers.{n}."
    qkv_weight, qkv_bias = _linear(
        rule(LAYER, here + "self_attention.linear_qkv", *(there + f"self_attn.{x}_proj" for x in "qkv"), combine=QKV),
        ROWS,
    )
    query_bias, _, value_bias = qkv_bias.sources
    return (
        *_linear(rule(FIRST, "audio_encoder.encoder.conv1", "audio_tower.conv1"), WHOLE),
        *_linear(rule(FIRST, "audio_encoder.encoder.conv2", "audio_tower.conv2"), WHOLE),
        replace(
            rule(FIRST, "audio_encoder.encoder.audio_bos_eos_token.weight", "audio_tower.audio_bos_eos_token.weight"),
            optional=True,
            kept_from_original=True,
        ),
        *_linear(rule(LAYER, here + "input_layernorm", there + "self_attn_layer_norm"), WHOLE),
        qkv_weight,
        replace(qkv_bias, sources=(query_bias, value_bias), combine=QKV_WITHOUT_KEY),
        *_linear(rule(LAYER, here + "self_attention.linear_proj", there + "self_attn.out_proj"), COLUMNS),
        *_linear(rule(LAYER, here + "pre_mlp_layernorm", there + "final_layer_norm"), WHOLE),
        *_linear(rule(LAYER, here + "mlp.linear_fc1", there + "fc1"), ROWS),
        *_linear(rule(LAYER, here + "mlp.linear_fc2", there + "fc2"), COLUMNS),
        *_linear(rule(LAST, "audio_encoder.encoder.ln_post", "audio_tower.ln_post"), WHOLE),
        *_linear(rule(LAST, "audio_encoder.encoder.proj", "audio_tower.proj"), WHOLE),
    )


def _text_rules(*, target_prefix: str) -> tuple[Rule, ...]:
    def rule(place: str, target: str, *sources: str, combine: str = COPY) -> Rule:
        return Rule(module=TEXT, place=place, target=target_prefix + target, sources=sources, combine=combine)

    here, there = "decoder.layers.{n}.", "model.layers.{n}."
    qkv = rule(LAYER, here + "self_attention.linear_qkv", *(there + f"self_attn.{x}_proj" for x in "qkv"), combine=QKV)
    gate_up = rule(LAYER, here + "mlp.linear_fc1", there + "mlp.gate_proj", there + "mlp.up_proj", combine=GATED)
    return (
        _linear(rule(FIRST, "embedding.word_embeddings", "model.embed_tokens"), VOCABULARY)[0],
        *_linear(rule(LAYER, here + "input_layernorm", there + "input_layernorm"), WHOLE),
        *_linear(qkv, ROWS),
        *_linear(rule(LAYER, here + "self_attention.linear_proj", there + "self_attn.o_proj"), COLUMNS),
        *_linear(rule(LAYER, here + "pre_mlp_layernorm", there + "post_attention_layernorm"), WHOLE),
        *_linear(gate_up, GATED_ROWS),
        *_linear(rule(LAYER, here + "mlp.linear_fc2", there + "mlp.down_proj"), COLUMNS),
        *_linear(rule(LAST, "decoder.final_layernorm", "model.norm"), WHOLE),
        _linear(rule(LAST, "output_layer", "lm_head"), VOCABULARY)[0],
    )


EMBEDDING = "embedding.word_embeddings.weight"
OUTPUT_LAYER = "output_layer.weight"


def is_output_layer(rule: Rule) -> bool:
    """Return whether the rule's tensor may be tied to the embedding."""
    return rule.module == TEXT and rule.target.endswith(OUTPUT_LAYER)


def classic_name(name: str) -> str:
    """Return the classic Hugging Face name of any of the naming forms."""
    name = name.removeprefix("thinker.")
    if name.startswith("model.visual."):
        return name.removeprefix("model.")
    if name.startswith("model.language_model."):
        return "model." + name.removeprefix("model.language_model.")
    return name


def nested_name(name: str) -> str:
    """Return the name newer transformers use for a classic name."""
    if name.startswith("visual."):
        return "model." + name
    if name.startswith("model."):
        return "model.language_model." + name.removeprefix("model.")
    return name


# Buffers some old files carry, and the parts of Omni that no trainer here has: kept from the original on the way back.
IGNORED_SOURCES = ("rotary_emb.inv_freq",)
UNCONVERTED_PREFIXES = ("talker.", "token2wav.")

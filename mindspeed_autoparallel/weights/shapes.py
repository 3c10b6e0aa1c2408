"""The shape of every Hugging Face tensor of a supported family, by its classic name, from the sizes in ``config.json``.

Names hold ``{n}`` where a layer's number stands, as in ``names``. A file whose tensors have other shapes belongs to
another model, whatever its header says; the random models of ``example`` are made from the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

Shape = tuple[int, ...]
NamedShape = tuple[str, Shape]
Size = Callable[[Mapping[str, Any], str, "int | None"], int]
"""``size(block, key, default)``: a positive whole number of ``config.json``, or an error that names the key."""


def tensor_shapes(config: Mapping[str, Any], size: Size) -> dict[str, Shape]:
    """Give name pattern -> shape for a flat ``config``: text keys on top, ``vision_config``, ``audio_config`` below."""
    out = size(config, "hidden_size", None)
    shapes: dict[str, Shape] = {}
    if config.get("vision_config") is not None:
        shapes |= dict(_vision_shapes(str(config["model_type"]), config["vision_config"], out, size))
    if config.get("audio_config") is not None:
        shapes |= dict(_audio_shapes(config["audio_config"], out, size))
    shapes |= dict(_text_shapes(config, size))
    return shapes


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Iterator[NamedShape]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, bias: bool) -> Iterator[NamedShape]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _vision_shapes(family: str, vision: Mapping[str, Any], out: int, size: Size) -> Iterator[NamedShape]:
    older = family == "qwen2_vl"
    width = size(vision, "embed_dim" if older else "hidden_size", None)
    patch, merge = size(vision, "patch_size", 14), size(vision, "spatial_merge_size", 2)
    channels = size(vision, "in_channels" if "in_channels" in vision else "in_chans", 3)
    frames = size(vision, "temporal_patch_size", 2)
    yield "visual.patch_embed.proj.weight", (width, channels, frames, patch, patch)
    block = "visual.blocks.{n}."
    yield from _norm(block + "norm1", width, bias=older)
    if family == "qwen2_5_omni":
        for part in "qkv":
            yield from _linear(f"{block}attn.{part}", width, width)
    else:
        yield from _linear(block + "attn.qkv", 3 * width, width)
    yield from _linear(block + "attn.proj", width, width)
    yield from _norm(block + "norm2", width, bias=older)
    if older:
        ffn = int(width * vision.get("mlp_ratio", 4))
        yield from _linear(block + "mlp.fc1", ffn, width)
        yield from _linear(block + "mlp.fc2", width, ffn)
    else:
        ffn = size(vision, "intermediate_size", None)
        yield from _linear(block + "mlp.gate_proj", ffn, width)
        yield from _linear(block + "mlp.up_proj", ffn, width)
        yield from _linear(block + "mlp.down_proj", width, ffn)
    merged = width * merge**2
    yield from _norm("visual.merger.ln_q", width, bias=older)
    yield from _linear("visual.merger.mlp.0", merged, merged)
    yield from _linear("visual.merger.mlp.2", out, merged)


def _audio_shapes(audio: Mapping[str, Any], out: int, size: Size) -> Iterator[NamedShape]:
    width, ffn = size(audio, "d_model", None), size(audio, "encoder_ffn_dim", None)
    for conv, channels in (("conv1", size(audio, "num_mel_bins", 128)), ("conv2", width)):
        yield f"audio_tower.{conv}.weight", (width, channels, 3)
        yield f"audio_tower.{conv}.bias", (width,)
    yield "audio_tower.audio_bos_eos_token.weight", (2, out)
    block = "audio_tower.layers.{n}."
    yield from _norm(block + "self_attn_layer_norm", width, bias=True)
    for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
        yield from _linear(f"{block}self_attn.{part}", width, width, bias=part != "k_proj")
    yield from _norm(block + "final_layer_norm", width, bias=True)
    yield from _linear(block + "fc1", ffn, width)
    yield from _linear(block + "fc2", width, ffn)
    yield from _norm("audio_tower.ln_post", width, bias=True)
    yield from _linear("audio_tower.proj", out, width)


def _text_shapes(config: Mapping[str, Any], size: Size) -> Iterator[NamedShape]:
    width, ffn = size(config, "hidden_size", None), size(config, "intermediate_size", None)
    heads, vocab = size(config, "num_attention_heads", None), size(config, "vocab_size", None)
    head_size = size(config, "head_dim", max(1, width // heads))
    groups = size(config, "num_key_value_heads", heads)
    bias = config["model_type"] != "llama"
    yield "model.embed_tokens.weight", (vocab, width)
    block = "model.layers.{n}."
    yield from _norm(block + "input_layernorm", width, bias=False)
    for part, num_rows in (("q_proj", heads), ("k_proj", groups), ("v_proj", groups)):
        yield from _linear(f"{block}self_attn.{part}", num_rows * head_size, width, bias=bias)
    yield from _linear(block + "self_attn.o_proj", width, heads * head_size, bias=False)
    yield from _norm(block + "post_attention_layernorm", width, bias=False)
    yield from _linear(block + "mlp.gate_proj", ffn, width, bias=False)
    yield from _linear(block + "mlp.up_proj", ffn, width, bias=False)
    yield from _linear(block + "mlp.down_proj", width, ffn, bias=False)
    yield from _norm("model.norm", width, bias=False)
    yield "lm_head.weight", (vocab, width)

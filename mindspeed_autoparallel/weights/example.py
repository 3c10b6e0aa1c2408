"""A Hugging Face folder with random weights of any supported family and size: to try a layout before the download.

Written tensor by tensor, so that models larger than memory can be made.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.files import write_json_atomic
from mindspeed_autoparallel.weights.huggingface import DEFAULT_SHARD_BYTES, ShardWriter
from mindspeed_autoparallel.weights.names import nested_name


def write_random_model(
    folder: Path,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: str = "float32",
    scale: float = 1.0,
    nested: bool = False,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """``config``: flat text keys plus ``vision_config`` and ``audio_config`` as the family has them.

    Values are normal with standard deviation ``scale``, those of norms around 1.
    """
    import torch

    folder.mkdir(parents=True)
    write_json_atomic(folder / "config.json", config)
    generator = torch.Generator().manual_seed(seed)
    writer = ShardWriter(folder, max_shard_bytes)
    omni = config["model_type"] == "qwen2_5_omni"
    for classic, shape in _shapes(config):
        # Without a thinker in front the names would be those of the text family.
        name = f"thinker.{classic}" if omni else nested_name(classic) if nested else classic
        values = torch.randn(shape, generator=generator).mul_(scale)
        if len(shape) == 1 and name.endswith(".weight"):
            values += 1.0
        writer.add(name, values.to(getattr(torch, dtype)))
    writer.finish()


def _shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    if "vision_config" in config:
        yield from _vision_shapes(config["model_type"], config["vision_config"], config["hidden_size"])
    if "audio_config" in config:
        yield from _audio_shapes(config["audio_config"], config["hidden_size"])
    yield from _text_shapes(config)


def _linear(name: str, rows: int, columns: int, bias: bool = True) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _norm(name: str, width: int, bias: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{name}.weight", (width,)
    if bias:
        yield f"{name}.bias", (width,)


def _vision_shapes(family: str, vision: dict[str, Any], out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    older = family == "qwen2_vl"
    width = vision["embed_dim"] if older else vision["hidden_size"]
    patch, merge = vision.get("patch_size", 14), vision.get("spatial_merge_size", 2)
    yield "visual.patch_embed.proj.weight", (width, 3, vision.get("temporal_patch_size", 2), patch, patch)
    for layer in range(vision["depth"]):
        block = f"visual.blocks.{layer}."
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
            ffn = vision["intermediate_size"]
            yield from _linear(block + "mlp.gate_proj", ffn, width)
            yield from _linear(block + "mlp.up_proj", ffn, width)
            yield from _linear(block + "mlp.down_proj", width, ffn)
    merged = width * merge**2
    yield from _norm("visual.merger.ln_q", width, bias=older)
    yield from _linear("visual.merger.mlp.0", merged, merged)
    yield from _linear("visual.merger.mlp.2", out, merged)


def _audio_shapes(audio: dict[str, Any], out: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn = audio["d_model"], audio["encoder_ffn_dim"]
    for conv, channels in (("conv1", audio.get("num_mel_bins", 128)), ("conv2", width)):
        yield f"audio_tower.{conv}.weight", (width, channels, 3)
        yield f"audio_tower.{conv}.bias", (width,)
    yield "audio_tower.audio_bos_eos_token.weight", (2, out)
    for layer in range(audio["encoder_layers"]):
        block = f"audio_tower.layers.{layer}."
        yield from _norm(block + "self_attn_layer_norm", width, bias=True)
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{block}self_attn.{part}", width, width, bias=part != "k_proj")
        yield from _norm(block + "final_layer_norm", width, bias=True)
        yield from _linear(block + "fc1", ffn, width)
        yield from _linear(block + "fc2", width, ffn)
    yield from _norm("audio_tower.ln_post", width, bias=True)
    yield from _linear("audio_tower.proj", out, width)


def _text_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    width, ffn, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or width // heads
    bias = config["model_type"] != "llama"
    rows = {"q_proj": heads * head_size, "k_proj": config["num_key_value_heads"] * head_size}
    rows["v_proj"] = rows["k_proj"]
    yield "model.embed_tokens.weight", (config["vocab_size"], width)
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}."
        yield from _norm(block + "input_layernorm", width, bias=False)
        for part, num_rows in rows.items():
            yield from _linear(f"{block}self_attn.{part}", num_rows, width, bias=bias)
        yield from _linear(block + "self_attn.o_proj", width, heads * head_size, bias=False)
        yield from _norm(block + "post_attention_layernorm", width, bias=False)
        yield from _linear(block + "mlp.gate_proj", ffn, width, bias=False)
        yield from _linear(block + "mlp.up_proj", ffn, width, bias=False)
        yield from _linear(block + "mlp.down_proj", width, ffn, bias=False)
    yield from _norm("model.norm", width, bias=False)
    if not config.get("tie_word_embeddings", False):
        yield "lm_head.weight", (config["vocab_size"], width)

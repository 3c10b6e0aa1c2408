"""What ``config.json`` of a Hugging Face model says of the sizes that decide how weights are cut."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.spec.model import MAX_LAYERS
from mindspeed_autoparallel.weights.shapes import Shape, tensor_shapes

VISION = "vision"
AUDIO = "audio"
TEXT = "text"
MODULES = (VISION, AUDIO, TEXT)

VISION_LANGUAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")
TEXT_FAMILIES = ("llama", "qwen2")
SUPPORTED = VISION_LANGUAGE_FAMILIES + TEXT_FAMILIES
_MAX_SIZE = 2**31 - 1
_LAYER_KEYS = ("num_hidden_layers", "depth", "encoder_layers")


@dataclass(frozen=True, kw_only=True)
class ModuleShape:
    """One stack of transformer layers. ``head_size`` is the width of one attention head."""

    num_layers: int
    num_heads: int
    num_query_groups: int
    head_size: int
    ffn_size: int
    hidden_size: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Family and shapes; ``modules`` has the keys ``vision``, ``audio`` and ``text`` as far as the model has them."""

    family: str
    modules: dict[str, ModuleShape]
    vocab_size: int
    tied_embeddings: bool
    shapes: dict[str, Shape] = field(default_factory=dict)
    """Classic Hugging Face name, ``{n}`` for the layer -> shape."""
    rope_scaling: str = ""
    """The kind of ``rope_scaling`` that the host must be told by flags of its own; empty for none."""


def read_architecture(folder: Path) -> Architecture:
    """Read the architecture of the Hugging Face model in ``folder``; ``ConfigError`` names what is missing or wrong."""
    return architecture_from_config(read_json(folder / "config.json", "model description"), str(folder / "config.json"))


def architecture_from_config(config: Any, where: str) -> Architecture:
    """Return ``config``: the content of config.json, in the flat form of older releases or with ``text_config``."""
    if not isinstance(config, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {type(config).__name__}.")
    family = config.get("model_type")
    if family == "qwen2_5_omni" and "thinker_config" in config:
        config = _block(config, "thinker_config", where)
    elif family == "qwen2_5_omni_thinker":
        family = "qwen2_5_omni"
    if family not in SUPPORTED:
        raise ConfigError(f"{where}: model_type {_short(family)} is not supported. Supported: {', '.join(SUPPORTED)}.")
    flat = {**config, **(_block(config, "text_config", where) if "text_config" in config else {}), "model_type": family}
    sizes = _Sizes(where)
    modules = {}
    if family in VISION_LANGUAGE_FAMILIES:
        modules[VISION] = _vision_shape(str(family), _block(flat, "vision_config", where), sizes)
    if family == "qwen2_5_omni":
        modules[AUDIO] = _audio_shape(_block(flat, "audio_config", where), sizes)
    modules[TEXT] = _text_shape(flat, sizes)
    for absent in {"vision_config": VISION, "audio_config": AUDIO}.items():
        if absent[1] not in modules:
            flat.pop(absent[0], None)
    # Older files say tie_word_embeddings at the top, newer thinker configs inside text_config.
    tied = config.get("tie_word_embeddings", flat.get("tie_word_embeddings", False))
    if not isinstance(tied, bool):
        raise ConfigError(f"{where}: tie_word_embeddings must be true or false, got {str(tied)[:60]!r}.")
    return Architecture(
        family=str(family),
        modules=modules,
        vocab_size=sizes(flat, "vocab_size"),
        tied_embeddings=tied,
        shapes=tensor_shapes(flat, sizes),
        rope_scaling=_rope_scaling(flat),
    )


class _Sizes:
    """Reads positive whole numbers of ``config.json``; ``ConfigError`` names file, key and value."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, block: Mapping[str, Any], key: str, default: int | None = None) -> int:
        value = block.get(key)
        if value is None:
            value = default
        if value is None:
            raise ConfigError(f"{self.where} has no {key!r}. Use the complete config.json of the model.")
        most = MAX_LAYERS if key in _LAYER_KEYS else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{self.where}: {key} must be a whole number from 1 to {most}, got {_short(value)}.")
        return value


def _short(value: Any) -> str:
    # A number of more digits than Python converts is too long to be shown anyway.
    text = "a huge number" if isinstance(value, int) and value.bit_length() > 200 else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _rope_scaling(flat: Mapping[str, Any]) -> str:
    scaling = flat.get("rope_scaling")
    if not isinstance(scaling, dict):
        return ""
    kind = str(scaling.get("rope_type", scaling.get("type", "")))[:40]
    return "" if kind in ("default", "mrope", "") else kind


def _text_shape(text: Mapping[str, Any], sizes: _Sizes) -> ModuleShape:
    num_heads, width = sizes(text, "num_attention_heads"), sizes(text, "hidden_size")
    groups = sizes(text, "num_key_value_heads", num_heads)
    if num_heads % groups:
        raise ConfigError(f"{sizes.where}: num_key_value_heads {groups} do not divide {num_heads} num_attention_heads.")
    return ModuleShape(
        num_layers=sizes(text, "num_hidden_layers"),
        num_heads=num_heads,
        num_query_groups=groups,
        head_size=sizes(text, "head_dim", width // num_heads),
        ffn_size=sizes(text, "intermediate_size"),
        hidden_size=width,
    )


def _vision_shape(family: str, vision: Mapping[str, Any], sizes: _Sizes) -> ModuleShape:
    # In Qwen2-VL hidden_size is the width after the merger; from 2.5 on it is the width of the tower itself.
    if family == "qwen2_vl":
        width, ratio = sizes(vision, "embed_dim"), vision.get("mlp_ratio", 4)
        if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1024:
            raise ConfigError(f"{sizes.where}: mlp_ratio must be a number from 0 to 1024, got {_short(ratio)}.")
        ffn_size = int(width * ratio)
    else:
        width = sizes(vision, "hidden_size")
        ffn_size = sizes(vision, "intermediate_size")
    return _ungrouped(vision, "depth", "num_heads", width, ffn_size, sizes)


def _audio_shape(audio: Mapping[str, Any], sizes: _Sizes) -> ModuleShape:
    width, ffn_size = sizes(audio, "d_model"), sizes(audio, "encoder_ffn_dim")
    return _ungrouped(audio, "encoder_layers", "encoder_attention_heads", width, ffn_size, sizes)


def _ungrouped(
    config: Mapping[str, Any], layers_key: str, heads_key: str, width: int, ffn_size: int, sizes: _Sizes
) -> ModuleShape:
    num_heads = sizes(config, heads_key)
    if width % num_heads:
        raise ConfigError(f"{sizes.where}: {heads_key} {num_heads} does not divide the width {width}.")
    return ModuleShape(
        num_layers=sizes(config, layers_key),
        num_heads=num_heads,
        num_query_groups=num_heads,
        head_size=width // num_heads,
        ffn_size=ffn_size,
        hidden_size=width,
    )


def _block(config: Mapping[str, Any], key: str, where: str) -> Mapping[str, Any]:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no {key!r}. Use the complete config.json of the model.")
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {key} must be an object, got {_short(value)}.")
    return value

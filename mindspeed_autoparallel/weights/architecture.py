"""What ``config.json`` of a Hugging Face model says of the sizes that decide how weights are cut."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json

VISION = "vision"
AUDIO = "audio"
TEXT = "text"
MODULES = (VISION, AUDIO, TEXT)

VISION_LANGUAGE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen2_5_omni")
TEXT_FAMILIES = ("llama", "qwen2")
SUPPORTED = VISION_LANGUAGE_FAMILIES + TEXT_FAMILIES


@dataclass(frozen=True, kw_only=True)
class ModuleShape:
    """One stack of transformer layers. ``head_size`` is the width of one attention head."""

    num_layers: int
    num_heads: int
    num_query_groups: int
    head_size: int
    ffn_size: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Family and shapes; ``modules`` has the keys ``vision``, ``audio`` and ``text`` as far as the model has them."""

    family: str
    modules: dict[str, ModuleShape]
    vocab_size: int
    tied_embeddings: bool


def read_architecture(folder: Path) -> Architecture:
    """The architecture of the Hugging Face model in ``folder``; ``ConfigError`` names what is missing or unknown."""
    return architecture_from_config(read_json(folder / "config.json", "model description"), str(folder / "config.json"))


def architecture_from_config(config: dict[str, Any], where: str) -> Architecture:
    """``config``: the content of config.json, in the flat form of older releases or with ``text_config``."""
    family = config.get("model_type")
    if family == "qwen2_5_omni" and "thinker_config" in config:
        config = config["thinker_config"]
    elif family == "qwen2_5_omni_thinker":
        family = "qwen2_5_omni"
    if family not in SUPPORTED:
        raise ConfigError(f"{where}: model_type {family!r} is not supported. Supported: {', '.join(SUPPORTED)}.")
    text = {**config, **config.get("text_config", {})}
    modules = {}
    if family in VISION_LANGUAGE_FAMILIES:
        modules[VISION] = _vision_shape(family, _need(config, "vision_config", where), where)
    if family == "qwen2_5_omni":
        modules[AUDIO] = _audio_shape(_need(config, "audio_config", where), where)
    modules[TEXT] = _text_shape(text, where)
    # Older files say tie_word_embeddings at the top, newer thinker configs inside text_config.
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    return Architecture(
        family=str(family), modules=modules, vocab_size=int(_need(text, "vocab_size", where)), tied_embeddings=tied
    )


def _text_shape(text: dict[str, Any], where: str) -> ModuleShape:
    num_heads = int(_need(text, "num_attention_heads", where))
    groups = text.get("num_key_value_heads") or num_heads
    head_size = text.get("head_dim") or int(_need(text, "hidden_size", where)) // num_heads
    return ModuleShape(
        num_layers=int(_need(text, "num_hidden_layers", where)),
        num_heads=num_heads,
        num_query_groups=int(groups),
        head_size=int(head_size),
        ffn_size=int(_need(text, "intermediate_size", where)),
    )


def _vision_shape(family: str, vision: dict[str, Any], where: str) -> ModuleShape:
    # In Qwen2-VL hidden_size is the width after the merger; from 2.5 on it is the width of the tower itself.
    if family == "qwen2_vl":
        width = int(_need(vision, "embed_dim", where))
        ffn_size = int(width * vision.get("mlp_ratio", 4))
    else:
        width = int(_need(vision, "hidden_size", where))
        ffn_size = int(_need(vision, "intermediate_size", where))
    return _ungrouped(vision, "depth", "num_heads", width, ffn_size, where)


def _audio_shape(audio: dict[str, Any], where: str) -> ModuleShape:
    width, ffn_size = int(_need(audio, "d_model", where)), int(_need(audio, "encoder_ffn_dim", where))
    return _ungrouped(audio, "encoder_layers", "encoder_attention_heads", width, ffn_size, where)


def _ungrouped(
    config: dict[str, Any], layers_key: str, heads_key: str, width: int, ffn_size: int, where: str
) -> ModuleShape:
    num_heads = int(_need(config, heads_key, where))
    return ModuleShape(
        num_layers=int(_need(config, layers_key, where)),
        num_heads=num_heads,
        num_query_groups=num_heads,
        head_size=width // num_heads,
        ffn_size=ffn_size,
    )


def _need(config: dict[str, Any], key: str, where: str) -> Any:
    if config.get(key) is None:
        raise ConfigError(f"{where} has no {key!r}. Use the complete config.json of the model.")
    return config[key]

"""The tensors of a Hugging Face model by its ``config.json``: names, sizes and places."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import read_json, shown
from mindspeed_autoparallel.weights.families.catalogue import COMPOSITES, SUPPORTED, TEXT_FAMILIES, Composite, Family
from mindspeed_autoparallel.weights.families.conditions import layer_words, model_words, stored_words
from mindspeed_autoparallel.weights.families.resolve import rules_of
from mindspeed_autoparallel.weights.families.sizes import Sizes
from mindspeed_autoparallel.weights.names import AUDIO, MODULES, TEXT, VISION, Rule, Shape, classic_name
from mindspeed_autoparallel.weights.safetensors_file import stored_shapes

__all__ = ["AUDIO", "MODULES", "TEXT", "VISION", "Architecture", "ModuleShape", "read_architecture"]

MEGATRON, MINDSPEED_LLM = "megatron", "mindspeed_llm"
HOSTS = (MEGATRON, MINDSPEED_LLM)
"""Naming scheme of the tensors: Megatron's (MindSpeed-MM's for encoders) or MindSpeed-LLM's."""
_TIED_BY_DEFAULT = ("gemma2", "gemma3_text")


@dataclass(frozen=True, kw_only=True)
class ModuleShape:
    """One stack of transformer layers. ``head_size``: width of one attention head. ``layer_words``: conditions of each
    layer, for the rules. ``num_multi_token``: layers after the last one that predict a further token."""

    num_layers: int
    num_heads: int
    num_query_groups: int
    head_size: int
    ffn_size: int
    hidden_size: int
    layer_words: tuple[frozenset[str], ...]
    num_experts: int = 0
    num_multi_token: int = 0


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """Family, shapes and rules; ``modules`` has those of the keys ``vision``, ``audio`` and ``text`` that the model
    has."""

    family: str
    modules: dict[str, ModuleShape]
    vocab_size: int
    tied_embeddings: bool
    rules: tuple[Rule, ...]
    copies: tuple[tuple[str, str], ...] = ()
    """Hugging Face names under which files of this model repeat a tensor -> the tensor they repeat."""
    left_out: tuple[str, ...] = ()
    """Prefixes of the names of parts that are not converted."""
    rope_scaling: str = ""
    """The kind of rope scaling, for which the host needs separate flags; empty for none."""
    dtype: str = ""
    """Type of the weights according to ``config.json``; empty if it names none."""

    @property
    def is_text_only(self) -> bool:
        """Return whether the checkpoint is that of a plain language model."""
        return set(self.modules) == {TEXT}


def read_architecture(folder: Path, host: str = MEGATRON, stored: Mapping[str, Shape] | None = None) -> Architecture:
    """Read the architecture of the Hugging Face model in ``folder``; ``ConfigError`` names what is missing or wrong.

    ``stored``, or the headers of its safetensors, show how it stores experts and whether it has layers for multi-token
    prediction.
    """
    stored = stored_shapes(folder) if stored is None else stored
    config = read_json(folder / "config.json", "model description")
    return architecture_from_config(config, str(folder / "config.json"), stored, host)


def architecture_from_config(
    config: Any, where: str, stored: Mapping[str, Shape] | None = None, host: str = MEGATRON
) -> Architecture:
    """Return the architecture of ``config``, the content of config.json: flat as in older releases, or with
    ``text_config``.

    ``stored``: Hugging Face name -> shape, of the files in its folder; None without any.
    """
    if not isinstance(config, dict):
        raise ConfigError(f"{where} must hold a JSON object, not {type(config).__name__}.")
    family = config.get("model_type")
    if family == "qwen2_5_omni" and "thinker_config" in config:
        config = _block(config, "thinker_config", where)
    elif family == "qwen2_5_omni_thinker":
        family = "qwen2_5_omni"
    if family not in SUPPORTED:
        raise ConfigError(f"{where}: model_type {shown(family)} is not supported. Supported: {', '.join(SUPPORTED)}.")
    flat = {**config, **(_block(config, "text_config", where) if "text_config" in config else {})}
    composite = COMPOSITES.get(family, Composite(text=family))
    text_name = composite.text or flat.get("model_type")
    if text_name not in TEXT_FAMILIES:
        raise ConfigError(f"{where}: a {family} with the language model {shown(text_name)} is not supported.")
    classic = None if stored is None else {classic_name(name): shape for name, shape in stored.items()}
    text = Sizes(flat, TEXT_FAMILIES[text_name].keys, where)
    stacks = [(TEXT, TEXT_FAMILIES[text_name], text)]
    for module, encoder, key in ((AUDIO, composite.audio, "audio_config"), (VISION, composite.vision, "vision_config")):
        if encoder is not None:
            block = _with_ffn(_block(flat, key, where), where)
            stacks.insert(0, (module, encoder, Sizes(block, encoder.keys, where, text)))
    modules: dict[str, ModuleShape] = {}
    rules: list[Rule] = []
    copies: list[tuple[str, str]] = []
    is_part = len(stacks) > 1
    for module, stack, sizes in stacks:
        shape = _module_shape(stack, sizes, classic, host)
        modules[module] = shape
        prefix = "text_decoder." if module == TEXT and is_part else ""
        rules += rules_of(module, stack, sizes, shape.layer_words, prefix=prefix, multi_token=shape.num_multi_token > 0)
        copies += _copies(stack, shape, classic)
    return Architecture(
        family=str(family),
        modules=modules,
        vocab_size=text["vocab"],
        tied_embeddings=_tied(config, flat, str(text_name), where),
        rules=tuple(rules),
        copies=tuple(copies),
        left_out=composite.left_out,
        rope_scaling=rope_scaling(flat, where),
        dtype=str(
            flat.get("dtype") or flat.get("torch_dtype") or config.get("dtype") or config.get("torch_dtype") or ""
        ),
    )


def _module_shape(family: Family, sizes: Sizes, stored: Mapping[str, Shape] | None, host: str) -> ModuleShape:
    num_layers, heads = sizes["layers"], sizes["heads"]
    is_text = "hidden" in family.keys
    width = sizes["hidden" if is_text else "width"]
    groups = sizes["groups"] if is_text else heads
    if heads % groups:
        raise ConfigError(f"{sizes.where}: num_key_value_heads {groups} do not divide {heads} num_attention_heads.")
    if not is_text and width % heads:
        raise ConfigError(f"{sizes.where}: {heads} attention heads do not divide the width {width}.")
    words = model_words(family, sizes.block) | ({host} if is_text else set())
    if stored is not None and "experts" in family.blocks:
        words = stored_words(words, stored, width)
    layers = tuple(words | layer_words(family, sizes.block, layer, sizes.where) for layer in range(num_layers))
    has_experts, has_dense = (any(("experts" in one) is wanted for one in layers) for wanted in (True, False))
    return ModuleShape(
        num_layers=num_layers,
        num_heads=heads,
        num_query_groups=groups,
        head_size=sizes["head"] if is_text else width // heads,
        ffn_size=sizes["ffn"] if has_dense else sizes["expert_ffn"],
        hidden_size=width,
        layer_words=layers,
        num_experts=sizes["experts"] if has_experts else 0,
        num_multi_token=_num_multi_token(family, sizes.block, num_layers, stored, sizes.where),
    )


def _num_multi_token(
    family: Family, block: Mapping[str, object], num_layers: int, stored: Mapping[str, Shape] | None, where: str
) -> int:
    """Count the layers for multi-token prediction: those in the files, or as many as config.json names if there are no
    files."""
    if not family.multi_token:
        return 0
    if stored is not None:
        found = 0
        while any(name.startswith(_prefix(family, found, num_layers)) for name in stored):
            found += 1
        return found
    number = block.get("num_nextn_predict_layers") or block.get("mtp_num_hidden_layers") or 0
    if type(number) is not int or not 0 <= number <= 64:
        raise ConfigError(
            f"{where}: num_nextn_predict_layers must be a whole number from 0 to 64, got {shown(number)}."
        )
    return number


def _prefix(family: Family, index: int, num_layers: int) -> str:
    return family.multi_token_layer.replace("{n}", str(index)).replace("{m}", str(num_layers + index))


def _copies(family: Family, shape: ModuleShape, stored: Mapping[str, Shape] | None) -> list[tuple[str, str]]:
    found = [
        (copy.replace("{m}", str(shape.num_layers + index)), original)
        for index in range(shape.num_multi_token)
        for copy, original in family.copies
    ]
    return [(copy, original) for copy, original in found if stored is not None and copy in stored]


def _tied(config: Mapping[str, object], flat: Mapping[str, object], text: str, where: str) -> bool:
    # Older files have tie_word_embeddings at the top, newer thinker configs inside text_config.
    tied = config.get("tie_word_embeddings", flat.get("tie_word_embeddings", text in _TIED_BY_DEFAULT))
    if not isinstance(tied, bool):
        raise ConfigError(f"{where}: tie_word_embeddings must be true or false, got {shown(tied)}.")
    return tied


def _with_ffn(vision: Mapping[str, object], where: str) -> Mapping[str, object]:
    """Return the block with the feed-forward width of Qwen2-VL, whose config gives it as a multiple of the width."""
    if "embed_dim" not in vision:
        return vision
    ratio, width = vision.get("mlp_ratio", 4), vision["embed_dim"]
    if isinstance(ratio, bool) or not isinstance(ratio, (int, float)) or not 0 < ratio <= 1024:
        raise ConfigError(f"{where}: mlp_ratio must be a number from 0 to 1024, got {shown(ratio)}.")
    return {**vision, "ffn_of_ratio": int(width * ratio) if type(width) is int else None}


def _block(config: Mapping[str, object], key: str, where: str) -> Mapping[str, object]:
    value = config.get(key)
    if value is None:
        raise ConfigError(f"{where} has no {key!r}. Use the complete config.json of the model.")
    if not isinstance(value, dict):
        raise ConfigError(f"{where}: {key} must be an object, got {shown(value)}.")
    return value


_PLAIN = ("default", "mrope", "axial", "")


ROPE_FLAGS = {
    "llama3": "Megatron has --use-rope-scaling and --rope-scaling-factor",
    "linear": "Megatron has --rotary-seq-len-interpolation-factor",
    "yarn": "Megatron has --position-embedding-type yarn, with latent attention --rope-type yarn and "
    "--rotary-scaling-factor",
}
"""Kind of scaling -> the host's flags for it."""


def rope_scaling(flat: Mapping[str, object], where: str) -> str:
    """Return the kind of rope scaling in ``config.json``: ``rope_scaling``, or ``rope_parameters`` of transformers 5.

    ``rope_parameters`` may have one block per kind of layer (Gemma 3); the first kind that is not plain counts.
    """
    for key in ("rope_scaling", "rope_parameters"):
        value = flat.get(key)
        if value is None:
            continue
        if not isinstance(value, dict):
            raise ConfigError(f"{where}: {key} must be an object, got {shown(value)}.")
        for block in (value, *(one for one in value.values() if isinstance(one, dict))):
            kind = str(block.get("rope_type", block.get("type", "")))[:40]
            if kind not in _PLAIN:
                return kind
    return ""

"""Which rows of the tables a model and each of its layers have: words such as ``experts``, ``qkv_bias``, ``not
linear``."""

from __future__ import annotations

from collections.abc import Mapping

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.weights.families.catalogue import Family
from mindspeed_autoparallel.weights.families.sizes import Block
from mindspeed_autoparallel.weights.names import Shape

_LINEAR_EVERY = 4  # of Qwen3-Next, by default: every fourth layer has full attention


def model_words(family: Family, block: Block) -> frozenset[str]:
    """Return the conditions that hold in every layer, from the family and its keys of ``config.json``."""
    words = set(family.always)
    for key, names in family.by_key.items():
        name, _, default = key.partition("=")
        if block.get(name, bool(default)):
            words |= set(names.split())
    return frozenset(words)


def stored_words(words: frozenset[str], stored: Mapping[str, Shape], hidden: int) -> frozenset[str]:
    """Return ``words`` plus the form of experts in these files: separate, stacked, or stacked and transposed.

    A stack is [expert, out, in] of the down projection, or [expert x out, in]; square ones have the family's form.
    """
    down = [shape for name, shape in stored.items() if name.endswith("experts.down_proj") and len(shape) in (2, 3)]
    each = any(".experts.0." in name for name in stored)
    if not (down or each) or "pairs" in words:
        return words
    if each:
        found = "each"
    else:
        square = len(down[0]) == 3 and down[0][1] == down[0][2]
        out_is_last = "transposed" in words if square else down[0][-1] == hidden
        found = "transposed" if out_is_last else "stacked"
    return words - {"each", "stacked", "transposed"} | {found}


def layer_words(family: Family, block: Block, layer: int, where: str) -> frozenset[str]:
    """Return the conditions of one layer: its kind of attention, and whether it has experts."""
    words = set()
    if "delta_attention" in family.blocks and _is_linear(block, layer, where):
        words.add("linear")
    if "experts" in family.blocks and _has_experts(block, layer, where):
        words.add("experts")
    places = block.get("deepstack_visual_indexes")
    if isinstance(places, list) and layer in places:
        words.add("deepstack")
    return frozenset(words)


def _is_linear(block: Block, layer: int, where: str) -> bool:
    kinds = block.get("layer_types")
    if kinds is None:
        return (layer + 1) % _number(block, "full_attention_interval", _LINEAR_EVERY, where) != 0
    if not isinstance(kinds, list) or len(kinds) <= layer:
        raise ConfigError(f"{where}: layer_types must name the kind of every layer, got {shown(kinds)}.")
    return bool(kinds[layer] == "linear_attention")


def _has_experts(block: Block, layer: int, where: str) -> bool:
    listed = block.get("moe_layers")  # Llama 4
    if isinstance(listed, list):
        return layer in listed
    if "interleave_moe_layer_step" in block:
        return (layer + 1) % _number(block, "interleave_moe_layer_step", 1, where) == 0
    without = block.get("mlp_only_layers") or ()
    dense_first = block.get("first_k_dense_replace") or 0
    if type(dense_first) is not int:
        raise ConfigError(f"{where}: first_k_dense_replace must be a whole number, got {shown(dense_first)}.")
    kinds = block.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sparse")
    every = (layer + 1) % _number(block, "decoder_sparse_step", 1, where) == 0
    return (
        layer >= dense_first
        and not (isinstance(without, list | tuple) and layer in without)
        and every
        and layer % _number(block, "moe_layer_freq", 1, where) == 0
    )


def _number(block: Block, key: str, default: int, where: str) -> int:
    value = block.get(key)
    if value is None:
        return default
    if type(value) is not int or value < 1:
        raise ConfigError(f"{where}: {key} must be a whole number of at least 1, got {shown(value)}.")
    return value

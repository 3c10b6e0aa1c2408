"""The symbols of the tables' shapes, and their keys in ``config.json``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown
from mindspeed_autoparallel.spec.model import MAX_LAYERS

Block = Mapping[str, object]
"""An object of ``config.json``, whose values are checked where they are read."""
_MAX_SIZE = 2**31 - 1

TEXT_KEYS = {
    "layers": "num_hidden_layers",
    "hidden": "hidden_size",
    "heads": "num_attention_heads",
    "groups": "num_key_value_heads else heads",
    "head": "head_dim else hidden/heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "experts": "num_experts num_local_experts n_routed_experts",
    "expert_ffn": "moe_intermediate_size",
    "shared_ffn": "shared_expert_intermediate_size else shared_experts*expert_ffn",
    "shared_experts": "n_shared_experts else 1",
    "q_rank": "q_lora_rank",
    "kv_rank": "kv_lora_rank",
    "nope": "qk_nope_head_dim",
    "rope": "qk_rope_head_dim",
    "qk": "else nope+rope",
    "v_head": "v_head_dim",
    "key_heads": "linear_num_key_heads",
    "value_heads": "linear_num_value_heads",
    "key": "else key_heads*linear_key_head",
    "value": "else value_heads*value_head",
    "linear_key_head": "linear_key_head_dim",
    "value_head": "linear_value_head_dim",
    "conv": "linear_conv_kernel_dim else 4",
}
"""Symbol -> keys in the order of preference, then ``else`` and an expression of other symbols."""

QWEN_VISION_KEYS = {
    "layers": "depth",
    "width": "hidden_size",
    "heads": "num_heads",
    "ffn": "intermediate_size",
    "patch": "patch_size else 14",
    "channels": "in_channels in_chans else 3",
    "frames": "temporal_patch_size else 2",
    "merge": "else merge_side*merge_side",
    "merge_side": "spatial_merge_size else 2",
    "places": "num_position_embeddings",
    "out": "else text.hidden",
}
INTERN_VISION_KEYS = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "ffn": "intermediate_size",
    "patch": "patch_size",
    "image": "image_size",
    "channels": "num_channels else 3",
    "side": "else image/patch",
    "places": "else side*side",
    "merge": "else 4",
    "out": "else text.hidden",
}
QWEN_AUDIO_KEYS = {
    "layers": "encoder_layers",
    "width": "d_model",
    "heads": "encoder_attention_heads",
    "ffn": "encoder_ffn_dim",
    "mels": "num_mel_bins else 128",
    "out": "else text.hidden",
}
_SQUARE_KEYS = ("image_size", "patch_size")
"""May be given as [height, width]."""
_LAYER_KEYS = ("num_hidden_layers", "depth", "encoder_layers")


class Sizes:
    """Reads positive whole numbers of a block of ``config.json``; ``ConfigError`` names file, key and value."""

    def __init__(self, block: Block, keys: Mapping[str, str], where: str, text: Sizes | None = None) -> None:
        self.block, self.keys, self.where, self.text = block, keys, where, text

    def __getitem__(self, symbol: str) -> int:
        if symbol.startswith("text."):
            assert self.text is not None
            return self.text[symbol.removeprefix("text.")]
        named, _, default = self.keys[symbol].partition("else")
        for key in named.split():
            if self.block.get(key) is not None:
                return self._checked(key, self.block[key])
        if not default:
            raise ConfigError(f"{self.where} has no {named.split()[0]!r}. Use the complete config.json of the model.")
        return max(1, self.of(default.strip()))

    def of(self, expression: str) -> int:
        """Return the value of sums of products and quotients of symbols and numbers: ``heads*nope+heads*v_head``."""
        return sum(self._product(part) for part in expression.split("+"))

    def shape(self, dimensions: str) -> tuple[int, ...]:
        """Return the values of ``dimensions``, expressions separated by spaces."""
        return tuple(self.of(one) for one in dimensions.split())

    def _product(self, part: str) -> int:
        top, *below = part.split("/")
        value = math.prod(int(one) if one.isdigit() else self[one] for one in top.split("*"))
        for one in below:
            value //= self[one]
        return value

    def _checked(self, key: str, value: Any) -> int:
        if key in _SQUARE_KEYS and isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]
        most = MAX_LAYERS if key in _LAYER_KEYS else _MAX_SIZE
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            raise ConfigError(f"{self.where}: {key} must be a whole number from 1 to {most}, got {shown(value)}.")
        return value

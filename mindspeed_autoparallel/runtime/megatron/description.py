"""The user's model, before anything is built: modules and their layers, from model.json or from the flags.

Measuring needs it to build a smaller model of the same kind; planning, to get the real number of layers;
applying, to refuse a plan made for another model.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError, flag_of
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.runtime.megatron.hybrid import PATTERN_ARGUMENT, hybrid_pattern, num_pattern_layers
from mindspeed_autoparallel.spec.model import GENERATOR

MODEL_FILE_ARGUMENT = "mm_model"
_LAYOUT_KEYS = frozenset(
    {
        *("tp", "pp", "cp", "mbs", "pipeline_num_layers", "recompute_num_layers"),
        *("recompute_granularity", "recompute_method"),
    }
)
_SHAPE_ARGUMENTS = (
    *("num_layers", "encoder_num_layers", "decoder_num_layers", "hidden_size", "ffn_hidden_size"),
    *("num_attention_heads", "kv_channels", "seq_length", "decoder_seq_length", "vocab_size", "swiglu", "squared_relu"),
    *("normalization", "qk_layernorm", "add_bias_linear", "add_qkv_bias", "untie_embeddings_and_output_weights"),
    *("position_embedding_type", "window_size", "window_attn_skip_freq", "linear_attention_freq"),
    *("experimental_attention_variant", "heterogeneous_layers_config_path", "spec", "mtp_num_layers", "img_h", "img_w"),
    *("patch_dim", "bf16", "fp16"),
)
"""Arguments of Megatron that shape the model by themselves."""
_SHAPE_UNDER_A_SWITCH = {
    "group_query_attention": ("num_query_groups",),
    "multi_latent_attention": ("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"),
    "num_experts": (
        "moe_router_topk",
        "moe_ffn_hidden_size",
        "moe_layer_freq",
        "moe_shared_expert_intermediate_size",
        "moe_latent_size",
    ),
}
"""Switch -> arguments that shape the model only if the switch is on: their defaults differ between releases."""


_MIMO = (("llm_tp", "encoder_tp"), ("model_provider", "dataset_provider"))
"""Arguments of the parsers of Megatron's MIMO examples."""


@dataclass(frozen=True)
class Description:
    """The model as the user described it."""

    modules: tuple[DescribedModule, ...]
    model_file: Path | None
    content: Mapping[str, object]
    """model.json; empty if the flags describe the model."""
    model_hash: str
    """Hash of everything that shapes the model, without its parallel layout."""

    def block_of(self, module: DescribedModule) -> Mapping[str, object]:
        """Return the block of ``module`` in model.json; an empty mapping if the flags describe it."""
        block: Mapping[str, object] = module.block_in(self.content) if module.keys else {}
        return block

    def with_layers(self, num_layers: Mapping[str, int], per_stage: Mapping[str, list[int]]) -> dict[str, object]:
        """Return a copy of model.json with other layer counts; ``per_stage`` also sets ``pipeline_num_layers``."""
        content = copy.deepcopy(dict(self.content))
        for module in self.modules:
            block = module.block_in(content)
            if module.name in num_layers and module.keys:
                block["num_layers"] = num_layers[module.name]
            if module.name in per_stage and module.keys:
                block["pipeline_num_layers"] = per_stage[module.name]
        return content


def describe(arguments: argparse.Namespace) -> Description:
    """Read the model that the host's ``arguments`` describe; ``ConfigError`` names file, key and allowed range."""
    file_name = getattr(arguments, MODEL_FILE_ARGUMENT, None)
    shape = _shape(arguments)
    if not file_name:
        return Description(_modules_of_flags(arguments), None, {}, _hash({"arguments": shape}))
    path = Path(file_name)
    content = read_json(path, "model description (--mm-model)")
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object with a block per module, got {type(content).__name__}.")
    found = modules_of_file(content, path)
    # With a model file, --num-layers only satisfies Megatron's parser.
    shape.pop("num_layers", None)
    return Description(found, path, content, _hash({"arguments": shape, "model": _without_layout(content)}))


def is_llava(arguments: argparse.Namespace) -> bool:
    """Return whether the script is Megatron's own pretrain_vlm.py (two models and a projection)."""
    return hasattr(arguments, "freeze_ViT") and hasattr(arguments, "freeze_LM")


def _shape(arguments: argparse.Namespace) -> dict[str, object]:
    """Read the arguments that shape a model; a switch that is off counts like one that a release lacks."""
    names = list(_SHAPE_ARGUMENTS)
    for switch, more in _SHAPE_UNDER_A_SWITCH.items():
        if getattr(arguments, switch, None):
            names += [switch, *more]
    values = {name: getattr(arguments, name, None) for name in names}
    if pattern := hybrid_pattern(arguments):
        # The pattern gives the number of layers; its stage ends, already removed, belong to the layout.
        values |= {"num_layers": None, PATTERN_ARGUMENT: pattern}
    return {name: value for name, value in values.items() if value}


def _modules_of_flags(arguments: argparse.Namespace) -> tuple[DescribedModule, ...]:
    _refuse_undescribed(arguments)
    own = getattr(arguments, "encoder_num_layers", None) if is_llava(arguments) else None
    layers = num_pattern_layers(hybrid_pattern(arguments)) or getattr(arguments, "num_layers", None) or own
    if not layers or layers < 1:
        raise ConfigError(f"--num-layers must be a positive integer, got {layers}.")
    if not is_llava(arguments):
        return (DescribedModule("text_decoder", int(layers), ()),)
    # The names of the model's attributes.
    decoder = int(getattr(arguments, "decoder_num_layers", None) or layers)
    return (
        DescribedModule("vision_model", int(own or layers), (), bool(arguments.freeze_ViT)),
        DescribedModule("language_model", decoder, (), bool(arguments.freeze_LM)),
    )


def _refuse_undescribed(arguments: argparse.Namespace) -> None:
    """Raise ``ConfigError`` for models that flags do not describe as one stack of layers.

    Models such as T5 have two stacks; MIMO's examples build custom modules, one of them on grids of ranks.
    """
    if any(all(hasattr(arguments, name) for name in names) for names in _MIMO):
        raise ConfigError(
            "this script trains a MIMO model, whose modules its own code builds and places (--model-provider, "
            "--llm-tp, --encoder-tp): no flag describes them, so nothing here is planned for it. Leave the flag out."
        )
    given = [name for name in ("decoder_num_layers", "decoder_seq_length") if getattr(arguments, name, None)]
    if given and not is_llava(arguments):
        raise ConfigError(
            f"this script trains an encoder and a decoder in one model ({flag_of(given[0])} "
            f"{getattr(arguments, given[0])}), which no search here splits into stages. Leave the flag out and lay it "
            "out by hand."
        )


def _without_layout(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_layout(item) for key, item in value.items() if key not in _LAYOUT_KEYS}
    if isinstance(value, list):
        return [_without_layout(item) for item in value]
    return value


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


BACKBONE = "text_decoder"
DEEPSTACK = "deepstack_visual_indexes"
_DIFFUSION = ("predictor", "diffusion")
_SIZES = ("hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size", "num_query_groups")


@dataclass(frozen=True)
class DescribedModule:
    """A block of model.json with layers, or the model that the flags describe."""

    name: str
    num_layers: int
    keys: tuple[str, ...]
    """Keys of its block in model.json; empty for a model that only flags describe."""
    frozen: bool = False
    deepstack_layers: int = 0
    """See ``spec.Module``."""

    def block_in(self, content: Any) -> Any:
        """Return its block of ``content``, a model.json; the whole content if the flags describe the module."""
        for key in self.keys:
            content = content[key]
        return content


def modules_of_file(content: Mapping[str, object], path: Path) -> tuple[DescribedModule, ...]:
    """Return the blocks with layers in execution order: encoders in file order, ``text_decoder``, a generator.

    Raises ``ConfigError`` if the file describes no text decoder (a diffusion model, an autoencoder, parts for
    feature extraction), if transformers builds the model and the layers in the file are placeholders, and if a
    number is invalid.
    """
    _refuse_other_models(content, path)
    found = [block for name, value in content.items() if (block := _block(content, name, value, path)) is not None]
    if all(block.name != BACKBONE for block in found):
        raise ConfigError(f"{path}: {BACKBONE} has no num_layers, so it cannot be cut into stages.")
    return tuple(sorted(found, key=lambda block: (block.name.endswith(GENERATOR), block.name == BACKBONE)))


def _refuse_other_models(content: Mapping[str, object], path: Path) -> None:
    if folder := content.get("init_from_hf_path"):
        raise ConfigError(
            f"{path} has its model built by transformers from {folder} (init_from_hf_path): its num_layers are "
            "placeholders, and such a model trains under FSDP2, without pipeline stages. Give the model.json of a "
            "model that Megatron builds, or leave our flags out."
        )
    if isinstance(content.get(BACKBONE), dict):
        return
    blocks = [name for name, value in content.items() if isinstance(value, (dict, list))]
    kind = "a diffusion model" if any(name in content for name in _DIFFUSION) else "another kind of model"
    raise ConfigError(
        f"{path} describes {kind} (blocks: {', '.join(blocks) or 'none'}); planned are models of encoders and a "
        f"{BACKBONE}, and this one has no {BACKBONE}."
    )


def _block(content: Mapping[str, object], name: str, value: Any, path: Path) -> DescribedModule | None:
    keys = next(_blocks_with_layers(value, (name,)), None) if isinstance(value, dict) else None
    if keys is None:
        return None
    block: Any = content
    for key in keys:
        block = block[key]
    layers = block["num_layers"]
    if isinstance(layers, bool) or not isinstance(layers, int) or layers < 1:
        raise ConfigError(f"{path}: {'.'.join(keys)}.num_layers must be a positive integer, got {layers!r}.")
    for key in _SIZES:
        size = block.get(key)
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ConfigError(f"{path}: {'.'.join(keys)}.{key} must be a positive integer, got {size!r}.")
    return DescribedModule(name, layers, keys, bool(block.get("freeze", False)), _deepstack(block, keys, path))


def _deepstack(block: Mapping[str, object], keys: tuple[str, ...], path: Path) -> int:
    """Return how many layers of a vision encoder provide features (Qwen3-VL)."""
    places = block.get(DEEPSTACK) or []
    if not isinstance(places, list):
        raise ConfigError(f"{path}: {'.'.join(keys)}.{DEEPSTACK} must be a list of layers, got {places!r}.")
    return len(places)


def _blocks_with_layers(block: Mapping[str, object], keys: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    if block.get("num_layers") is not None:
        yield keys
        return
    for key, value in block.items():
        # In some files a projector has layers, too; it belongs to its encoder.
        if isinstance(value, dict) and "projector" not in key:
            yield from _blocks_with_layers(value, (*keys, key))

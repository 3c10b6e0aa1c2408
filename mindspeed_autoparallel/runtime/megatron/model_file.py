"""The modules of a model.json, as MindSpeed-MM writes it; files of other models are refused with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.spec.model import GENERATOR

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

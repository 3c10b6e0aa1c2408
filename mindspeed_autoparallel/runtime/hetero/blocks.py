"""Checks of the other keys of a module's block in model.json against its sizes and the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.files import shown


def check_block(
    where: str, block: Mapping[str, object], sizes: Mapping[str, int], role: str, world_size: int, source: str
) -> None:
    """Raise ``ConfigError`` if the block contradicts ``sizes`` (tp, pp, cp) or ``world_size``.

    ``where``: the block's path in the file ``source``; ``role``: the module's, one of ``layouts.ROLES``.
    """
    size = sizes["tp"] * sizes["pp"] * sizes["cp"]
    if world_size % size:
        raise ConfigError(
            f"{source}: {where}: {world_size} ranks are not a multiple of tp {sizes['tp']} x pp {sizes['pp']} x cp "
            f"{sizes['cp']} = {size}. Change the sizes or the number of ranks."
        )
    _check_world(where, block, world_size, size, source)
    for heads in _heads(block):
        for key in ("tp", "cp"):
            if heads % sizes[key]:
                raise ConfigError(
                    f"{source}: {where}: {heads} attention heads cannot be divided by {key} {sizes[key]}. Take a "
                    f"divisor of {heads}."
                )
    for width in _ffn_sizes(block):
        if width % sizes["tp"]:
            raise ConfigError(
                f"{source}: {where}: ffn_hidden_size {width} cannot be divided by tp {sizes['tp']}. Take a divisor of "
                f"{width}."
            )
    if role != "backbone":
        _check_stages(where, block, sizes["pp"], source)


def _check_world(where: str, block: Mapping[str, object], world_size: int, size: int, source: str) -> None:
    """Raise ``ConfigError`` for ``dp``, ``ranks`` and ``ep`` that contradict the job: they would have no effect."""
    follows = {"dp": world_size // size, "ranks": world_size, "ep": 1}
    why = {
        "dp": f"{world_size} ranks / (tp x pp x cp = {size}) = {follows['dp']}",
        "ranks": f"every module runs on all {world_size} ranks of the job",
        "ep": "experts are split by --expert-model-parallel-size, in the backbone only",
    }
    for key, right in follows.items():
        value = block.get(key)
        if value is None or (value == right and not isinstance(value, bool)):
            continue
        if key == "ranks" and value == list(range(world_size)):
            continue
        raise ConfigError(f"{source}: {where}.{key} is {shown(value)}, but {why[key]}. Leave {key} out.")


def _check_stages(where: str, block: Mapping[str, object], stages: int, source: str) -> None:
    """Raise ``ConfigError`` if a stage of an encoder's or generator's own pipeline has no layer."""
    num_layers = block.get("num_layers")
    if isinstance(num_layers, int) and num_layers < stages:
        raise ConfigError(
            f"{source}: {where}: {num_layers} layers do not give each of pp {stages} stages one. Take at most pp "
            f"{num_layers}."
        )
    for counts in _layer_counts(block):
        if stages > 1 and isinstance(counts, list) and 0 in counts:
            raise ConfigError(
                f"{source}: {where}.pipeline_num_layers is {shown(counts)}, but every stage of a module's own "
                "pipeline needs at least one layer. Move a layer there, or lower pp."
            )


def _layer_counts(block: Mapping[str, object]) -> Iterator[Any]:
    """Yield ``pipeline_num_layers`` of the block and of the blocks in it."""
    if "pipeline_num_layers" in block:
        yield block["pipeline_num_layers"]
    for child in block.values():
        if isinstance(child, Mapping):
            yield from _layer_counts(child)


def _ffn_sizes(block: Mapping[str, object]) -> Iterator[int]:
    """Yield the feed-forward widths of the block and of the blocks in it, projectors included."""
    width = block.get("ffn_hidden_size")
    if isinstance(width, int) and not isinstance(width, bool):
        yield width
    for child in block.values():
        if isinstance(child, Mapping):
            yield from _ffn_sizes(child)


def _heads(block: Mapping[str, object]) -> Iterator[int]:
    """Yield attention heads of the block and of the blocks in it, except projectors, which have no attention."""
    heads = block.get("num_attention_heads", block.get("num_heads"))
    if isinstance(heads, int):
        yield heads
    for key, child in block.items():
        if isinstance(child, Mapping) and "projector" not in key:
            yield from _heads(child)

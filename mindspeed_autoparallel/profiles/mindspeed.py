"""Reads a profile file: ours, or MindSpeed's ``model_profile.json`` of six blocks at one TP and micro batch size.

``fwd_time`` and ``bwd_time`` are ms, ``act_mem`` and ``module_param`` ([parameters, optimizer, gradients]) MiB. Its
memory rule is kept unchanged (``memory_semantics`` "mindspeed"): stage memory = (activations - recomputed activations)
x (in-flight - 1) + activations + static; a recomputed layer saves its ``act_mem`` and adds its ``fwd_time`` to the
backward. ``vit_pre``, ``vit_post``, ``llm_pre`` and ``llm_post`` each hold the first or last layer: a module of n
layers is its pre block, n - 2 layers and its post block, placed one by one; all are recomputed with the figures of a
plain layer, as that tool counts them. Sizes that it lacks (parameter counts) are derived from ``module_param``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import msgspec

from mindspeed_autoparallel.errors import ConfigError, ProfileError
from mindspeed_autoparallel.files import read_json
from mindspeed_autoparallel.profiles.blocks import (
    BlockCost,
    MeasuredAt,
    Measurement,
    ModuleCost,
    RecomputeCost,
    StateBytes,
    mean_layer,
)
from mindspeed_autoparallel.profiles.device import Collective, DeviceCost, LinkTier
from mindspeed_autoparallel.profiles.profile import Profile, Provenance
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.units import GIB, MAX_DURATION_US, MIB, US_PER_MS


def read_profile(path: Path, *, tensor_size: int = 1, p2p_gbps: float = 25.0) -> Profile:
    """Return the profile in ``path``; ``ProfileError`` if it is foreign or broken.

    ``tensor_size`` and ``p2p_gbps`` (GiB/s) only complete MindSpeed's file, which holds neither.
    """
    try:
        value = read_json(path, "profile")
    except ConfigError as error:
        raise ProfileError(str(error)) from error
    if is_mindspeed_profile(value):
        return parse_mindspeed_profile(value, str(path), tensor_size=tensor_size, p2p_gbps=p2p_gbps)
    return Profile.parse(value, str(path))


MOST_LAYERS = 100_000
MAX_BLOCK_BYTES = 2**50
"""Sums over layers and microbatches then stay within 64 bits."""
_Ms = Annotated[float, msgspec.Meta(ge=0, le=MAX_DURATION_US / US_PER_MS)]
_MiB = Annotated[float, msgspec.Meta(ge=0, le=MAX_BLOCK_BYTES / MIB)]
DEFAULT_CAPACITY_BYTES = 62000 * MIB
"""MindSpeed's own fixed limit, used when no --memory-limit-mib is given."""


class _Block(msgspec.Struct):
    fwd_time: _Ms
    bwd_time: _Ms
    act_mem: _MiB
    module_param: tuple[_MiB, _MiB, _MiB]


class _Blocks(msgspec.Struct):
    vit_pre: _Block
    vit: _Block
    vit_post: _Block
    llm_pre: _Block
    llm: _Block
    llm_post: _Block


def is_mindspeed_profile(value: Any) -> bool:
    """Return whether the JSON has at least one of MindSpeed's blocks on top and is not our format."""
    return (
        isinstance(value, dict) and "format" not in value and any(block in value for block in _Blocks.__struct_fields__)
    )


def parse_mindspeed_profile(value: dict[str, object], where: str, *, tensor_size: int, p2p_gbps: float) -> Profile:
    """Return the file as a ``Profile``; ``ProfileError`` names a missing or impossible key."""
    if not math.isfinite(p2p_gbps) or p2p_gbps <= 0:
        raise ProfileError(f"the p2p bandwidth must be above 0 GiB/s, got {p2p_gbps}.")
    hidden = _integer(value, "text_decoder.hidden_size", where)
    sequence = _integer(value, "text_decoder.seq_length", where)
    micro_batch = _integer(value, "micro_batch_size", where)
    # That tool sends sequence x micro batch x hidden in 2-byte numbers over every boundary.
    boundary_bytes = sequence * micro_batch * hidden * 2
    if boundary_bytes > MAX_BLOCK_BYTES:
        raise ProfileError(
            f"{where}: text_decoder.seq_length x micro_batch_size x text_decoder.hidden_size must be below 2^49 values."
        )
    try:
        read = msgspec.structs.asdict(msgspec.convert(value, _Blocks))
    except msgspec.ValidationError as error:
        raise ProfileError(f"{where}: {error}.") from error
    splits = bool(value.get("use_distributed_optimizer"))
    blocks = {name: _block_cost(block, boundary_bytes, splits) for name, block in read.items()}
    modules, costs = [], {}
    for name, key, count, before in (
        ("image_encoder", "vit", "image_encoder.vision_encoder.num_layers", ()),
        ("text_decoder", "llm", "text_decoder.num_layers", ("image_encoder",)),
    ):
        num_layers = _integer(value, count, where)
        if not 2 <= num_layers <= MOST_LAYERS:
            raise ProfileError(
                f"{where}: {count} is {num_layers}; 2 to {MOST_LAYERS} layers can be read, since {key}_pre and "
                f"{key}_post hold the first and the last one."
            )
        modules.append(
            Module(
                name=name,
                result_key=key,
                num_layers=num_layers,
                predecessors=before,
                hidden_size=hidden if key == "llm" else 0,
                tokens_per_sample=sequence if key == "llm" else 0,
            )
        )
        plain = blocks[key]
        kinds = tuple(_recomputed_like(blocks[name], plain) for name in (f"{key}_pre", key, f"{key}_post"))
        pattern = (0, *(1,) * (num_layers - 2), 2)
        costs[name] = ModuleCost(layer=mean_layer(kinds, pattern), kinds=kinds, pattern=pattern)
    link = LinkTier(default=Collective(latency_us=0.0, bytes_per_s=p2p_gbps * GIB))
    return Profile(
        model=Model(name="model_profile.json", modules=tuple(modules), sequence_length=sequence),
        device=DeviceCost(memory_capacity_bytes=DEFAULT_CAPACITY_BYTES, intra=link, inter=link),
        measurements=(
            Measurement(at=MeasuredAt(tensor_size=tensor_size, micro_batch_size=micro_batch), modules=costs),
        ),
        provenance=Provenance(source="imported", device="MindSpeed model_profile.json", created_utc=""),
        memory_semantics="mindspeed",
    )


def _look_up(value: dict[str, object], key: str, where: str) -> Any:
    """Return a dotted key, nested or written flat, as both are seen."""
    if key in value:
        return value[key]
    found: Any = value
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            raise ProfileError(f"{where}: key {key!r} is missing.")
        found = found[part]
    return found


def _integer(value: dict[str, object], key: str, where: str) -> int:
    number = _look_up(value, key, where)
    if isinstance(number, bool) or not isinstance(number, (int, float)) or not 1 <= number < math.inf or number % 1:
        raise ProfileError(f"{where}: {key} must be a whole number of at least 1, got {number!r}.")
    return int(number)


def _block_cost(block: _Block, output_bytes: int, splits_optimizer: bool) -> BlockCost:
    weights, optimizer, gradients = (round(part * MIB) for part in block.module_param)
    # 12 bytes per parameter, whole. A distributed optimizer keeps 4 of them on every rank and splits 8.
    kept = optimizer // 3 if splits_optimizer else optimizer
    return BlockCost(
        forward_us=block.fwd_time * US_PER_MS,
        backward_us=block.bwd_time * US_PER_MS,
        recompute={"none": RecomputeCost(saved_bytes=round(block.act_mem * MIB))},
        output_bytes=output_bytes,
        dense=StateBytes(
            num_parameters=weights // 2,
            parameter_bytes=weights,
            gradient_bytes=gradients,
            optimizer_bytes=optimizer - kept,
            optimizer_unshardable_bytes=kept,
        ),
    )


def _recomputed_like(block: BlockCost, plain: BlockCost) -> BlockCost:
    """Return a block that saves a plain layer's activations when it is recomputed, for a plain layer's forward."""
    saved = block.recompute["none"].saved_bytes
    left = max(0, saved - plain.recompute["none"].saved_bytes)
    full = RecomputeCost(saved_bytes=left, extra_backward_us=plain.forward_us)
    return replace(block, recompute={**block.recompute, "full": full})

"""MindSpeed's ``model_profile.json``: six blocks measured under one TP and micro batch size.

``fwd_time`` and ``bwd_time`` are ms, ``act_mem`` and ``module_param`` ([parameters, optimizer, gradients]) MiB. Its
memory rule is kept as it is there (``memory_semantics`` "mindspeed"): stage memory = (activations - recomputed
activations) x (in-flight - 1) + activations + static; a recomputed layer saves its ``act_mem`` and adds its
``fwd_time`` to the backward. ``vit_pre``, ``vit_post``, ``llm_pre`` and ``llm_post`` each hold the first or last layer:
a module of n layers is its pre block, n - 2 layers and its post block, placed one by one; all are recomputed with the
figures of a plain layer, as that tool counts them. Sizes that it lacks (parameter counts) are derived from
``module_param``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles.blocks import BlockCost, ModuleCost, RecomputeCost, StateBytes, mean_layer
from mindspeed_autoparallel.profiles.device import Collective, DeviceCost, LinkTier
from mindspeed_autoparallel.profiles.measurement import MeasuredAt, Measurement
from mindspeed_autoparallel.profiles.profile import Profile, Provenance
from mindspeed_autoparallel.spec.model import Model, Module
from mindspeed_autoparallel.units import GIB, MAX_DURATION_US, MIB, US_PER_MS

BLOCKS = ("vit_pre", "vit", "vit_post", "llm_pre", "llm", "llm_post")
MOST_LAYERS = 100_000
DEFAULT_CAPACITY_BYTES = 62000 * MIB
"""MindSpeed's own fixed limit, used when no --memory-limit-mib is given."""


def is_mindspeed_profile(value: Any) -> bool:
    """Return whether the JSON has at least one of MindSpeed's blocks on top and is not our format."""
    return isinstance(value, dict) and "format" not in value and any(block in value for block in BLOCKS)


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
    blocks = {name: _block(value, name, where, boundary_bytes) for name in BLOCKS}
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


def _number(value: Any, what: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ProfileError(f"{where}: {what} must be a finite number of at least 0, got {value!r}.")
    return float(value)


MAX_BLOCK_BYTES = 2**50
"""Sums over layers and microbatches then stay within 64 bits."""


def _bytes(mib: Any, what: str, where: str) -> int:
    size = _number(mib, what, where) * MIB
    if size > MAX_BLOCK_BYTES:
        raise ProfileError(f"{where}: {what} must be a size in MiB below 1 PiB, got {mib!r}.")
    return round(size)


def _microseconds(ms: Any, what: str, where: str) -> float:
    duration_us = _number(ms, what, where) * US_PER_MS
    if duration_us > MAX_DURATION_US:
        raise ProfileError(f"{where}: {what} must be at most {MAX_DURATION_US / US_PER_MS:g} ms, got {ms!r}: too long.")
    return duration_us


def _block(value: dict[str, object], name: str, where: str, output_bytes: int) -> BlockCost:
    block = value.get(name)
    if not isinstance(block, dict):
        raise ProfileError(f"{where}: block {name!r} is missing; needed: {', '.join(BLOCKS)}.")
    for key in ("fwd_time", "bwd_time", "act_mem", "module_param"):
        if key not in block:
            raise ProfileError(f"{where}: {name}.{key} is missing.")
    forward_us = _microseconds(block["fwd_time"], f"{name}.fwd_time", where)
    saved = _bytes(block["act_mem"], f"{name}.act_mem", where)
    parameters = block["module_param"]
    if not isinstance(parameters, (list, tuple)) or len(parameters) != 3:
        raise ProfileError(f"{where}: {name}.module_param must be [parameters, optimizer, gradients] in MiB.")
    weights, optimizer, gradients = (_bytes(part, f"{name}.module_param", where) for part in parameters)
    # 12 bytes per parameter, whole. A distributed optimizer keeps 4 of them on every rank and splits 8.
    kept = optimizer // 3 if value.get("use_distributed_optimizer") else optimizer
    return BlockCost(
        forward_us=forward_us,
        backward_us=_microseconds(block["bwd_time"], f"{name}.bwd_time", where),
        recompute={"none": RecomputeCost(saved_bytes=saved)},
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

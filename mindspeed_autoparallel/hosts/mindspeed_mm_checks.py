"""Checks of MindSpeed-MM's native trainer, run before it starts; each rule follows its code."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.errors import ConfigError
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig, NativeSizes
from mindspeed_autoparallel.hosts.patterns import compile_pattern, matching_names
from mindspeed_autoparallel.spec.sharded import ShardSizes

_PLAN = "parallel.fsdp_plan"
KNOWN: dict[str, frozenset[str]] = {
    section: frozenset(names.split())
    for section, names in {
        "parallel": "data_parallel_size fully_shard_parallel_size fsdp_plan tensor_parallel_size tp_plan "
        "ring_attention_size ulysses_parallel_size expert_parallel_size expert_fully_shard_parallel_size ep_plan "
        "recompute recompute_plan",
        _PLAN: "ignored_modules apply_modules param_dtype reduce_dtype output_dtype cast_forward_inputs "
        "reshard_after_forward num_to_forward_prefetch num_to_backward_prefetch pregather hook_modules cpu_offload",
        "parallel.ep_plan": "apply_modules use_npu_fused_ops dispatcher apply_efsdp_modules",
        "features": "recompute recompute_plan loss_cfg enable_chunk_loss enable_dynamic_chunk_loss chunkloss_plan "
        "enable_activation_offload activation_offload_plan enable_chunk_mbs chunkmbs_plan enable_ep_balance "
        "ep_balance_plan skip_moe_pad_tokens",
        "features.recompute_plan": "apply_modules use_reentrant",
        "features.activation_offload_plan": "apply_modules",
        "features.chunkloss_plan": "apply_module chunk_size total_chunk_size",
        "features.chunkmbs_plan": "apply_modules chunk_mbs batch_dim chunk_arg_indexs chunk_kwarg_names",
    }.items()
}
_MOVED = {
    "parallel.pregather": f"{_PLAN}.pregather",
    "parallel.recompute": "features.recompute",
    "parallel.recompute_plan": "features.recompute_plan",
    "parallel.context_parallel_size": "parallel.ulysses_parallel_size",
    "parallel.cpu_offload": f"{_PLAN}.cpu_offload",
}


@dataclass(frozen=True)
class IdleKey:
    """A key without effect; ``instead`` is the probably intended one, or empty."""

    key: str
    instead: str


def idle_keys(config: NativeConfig) -> list[IdleKey]:
    """Return keys without effect: of ``features`` under ``model``, of other sections, and unknown ones."""
    found = []
    for section, known in KNOWN.items():
        values = config.values.at(section)
        for key in values if isinstance(values, Mapping) else ():
            name = f"{section}.{key}"
            if name in _MOVED and values[key] not in (False, 1, None):
                found.append(IdleKey(name, _MOVED[name]))
            elif key not in known and name not in _MOVED:
                found.append(IdleKey(name, nearest(section, str(key), values)))
    model = config.values.at("model")
    for key in model if isinstance(model, Mapping) else ():
        if key in KNOWN["features"]:
            found.append(IdleKey(f"model.{key}", f"features.{key}"))
    return found


def nearest(section: str, key: str, present: Mapping[str, object]) -> str:
    """Return the known key of ``section``, dotted, that ``key`` misspells; empty if none is similar and unset."""
    unset = [name for name in KNOWN[section] if name not in present]
    close = difflib.get_close_matches(key, unset, 1, 0.8)
    return f"{section}.{close[0]}" if close else ""


def shard_sizes(config: NativeConfig, num_devices: int, npu: bool = True) -> ShardSizes:
    """Return the sizes on ``num_devices`` devices; raises ``ConfigError`` with the first reason why the trainer refuses
    them.

    ``npu``: whether the devices are NPUs; ring attention requires them.
    """
    problems = refused_sizes(config.sizes, num_devices, npu)
    if problems:
        raise ConfigError(f"{config.path}: {problems[0]}")
    sizes = config.sizes
    return ShardSizes(
        num_devices=num_devices,
        fully_shard_size=sizes.fully_shard or num_devices // sizes.tensor,
        ulysses_size=sizes.ulysses,
        ring_size=sizes.ring,
        expert_size=sizes.expert,
        expert_shard_size=sizes.expert_fully_shard or num_devices // sizes.expert,
        micro_batch_size=sizes.micro_batch,
        accumulation=sizes.accumulation,
    )


def refused_sizes(sizes: NativeSizes, world: int, npu: bool = True) -> list[str]:
    """Return why the trainer refuses ``sizes`` on ``world`` devices (``ParallelArguments``, ``ParallelState``)."""
    shard = sizes.fully_shard or world // sizes.tensor
    expert_shard = sizes.expert_fully_shard or world // sizes.expert
    context = sizes.ring * sizes.ulysses
    data = world // (sizes.tensor * context)
    inner = shard // sizes.ring // sizes.ulysses
    problems = [
        (sizes.tensor != 1, f"tensor_parallel_size {sizes.tensor}: the trainer has no tensor parallelism; set 1."),
        (sizes.ring != 1 and not npu, f"ring_attention_size {sizes.ring} runs on NPUs only; set 1."),
        (
            world % (sizes.tensor * context) != 0,
            f"ring {sizes.ring} x Ulysses {sizes.ulysses} does not divide {world}.",
        ),
        (
            not shard or world % (sizes.tensor * max(1, shard)) != 0,
            f"fully_shard_parallel_size {shard} does not divide {world}.",
        ),
        (shard < context, f"fully_shard_parallel_size {shard} is below ring x Ulysses = {context}."),
        (
            bool(inner) and (shard % context != 0 or data % max(1, inner) != 0),
            f"fully_shard_parallel_size {shard} is not a multiple of ring x Ulysses = {context}.",
        ),
        (
            sizes.data is not None and sizes.data != data,
            f"data_parallel_size {sizes.data} is not {world} / (ring x Ulysses) = {data}; remove it.",
        ),
        (sizes.expert > world, f"expert_parallel_size {sizes.expert} is above the {world} devices."),
        (
            bool(expert_shard) and world % (sizes.expert * expert_shard) != 0,
            f"expert_parallel_size {sizes.expert} x expert_fully_shard_parallel_size {expert_shard} does not divide "
            f"{world}.",
        ),
    ]
    return [message for wrong, message in problems if wrong]


def check_modules(config: NativeConfig, names: Sequence[str]) -> None:
    """Raise ``ConfigError`` for a list of patterns that the trainer refuses on a model with these modules.

    Each of ``apply_modules``, ``hook_modules``, ``recompute``, ``chunk_mbs`` and, above EP 1, the experts must match at
    least one module; a pattern with other braces than ``{*}`` and ``{a-b}`` is always refused.
    """
    sharding, features = config.sharding, config.features
    lists = [
        ("parallel.fsdp_plan.apply_modules", sharding.apply_modules),
        ("parallel.fsdp_plan.hook_modules", sharding.hook_modules),
        ("features.recompute_plan.apply_modules", features.recompute),
        ("features.chunkmbs_plan.apply_modules", features.chunk_batch),
    ]
    if features.chunk_loss_module:
        lists.append(("features.chunkloss_plan.apply_module", (features.chunk_loss_module,)))
    if config.sizes.expert > 1:
        lists.append(("parallel.ep_plan.apply_modules", sharding.expert_modules))
    others = [("parallel.fsdp_plan.ignored_modules", sharding.ignored_modules)]
    others += [("features.activation_offload_plan.apply_modules", features.offload)]
    for key, patterns in (*lists, *others):
        for pattern in patterns:
            try:
                compile_pattern(pattern)
            except ConfigError as error:
                raise ConfigError(f"{config.path}: {key}: {error}") from None
    for key, patterns in lists:
        if patterns and not matching_names(patterns, names):
            raise ConfigError(f"{config.path}: {key} {', '.join(patterns)} matches no module of the model.")
    unchunked = refused_chunks(config, names)
    if unchunked:
        raise ConfigError(f"{config.path}: {unchunked}")


def refused_chunks(config: NativeConfig, names: Sequence[str]) -> str:
    """Return why a chunked micro batch cannot be used: its modules must be recomputed and offloaded as well.

    The trainer's page demands both (docs/zh/features/chunkmbs.md) and its code checks neither: without them a chunk
    keeps what the whole batch keeps, and chunking saves nothing.
    """
    features = config.features
    recomputed, offloaded = matching_names(features.recompute, names), matching_names(features.offload, names)
    for name in matching_names(features.chunk_batch, names):
        for what, listed in (("recompute_plan", recomputed), ("activation_offload_plan", offloaded)):
            if name not in listed:
                return f"features.chunkmbs_plan holds {name}, which features.{what} lacks: chunking needs both."
    return ""

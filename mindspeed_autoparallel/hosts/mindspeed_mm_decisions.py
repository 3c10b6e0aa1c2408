"""Read the decisions of a file of MindSpeed-MM's native trainer, and find the values that set those of a plan."""

from __future__ import annotations

from collections.abc import Sequence

from mindspeed_autoparallel.errors import PlanError
from mindspeed_autoparallel.hosts.mindspeed_mm import NativeConfig
from mindspeed_autoparallel.hosts.mindspeed_mm_checks import check_modules, shard_sizes
from mindspeed_autoparallel.hosts.patterns import changed_list, layers_of, matching_names, policies_of, wrapped_patterns
from mindspeed_autoparallel.hosts.yaml_edit import Value
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import (
    KEEP,
    OFFLOAD,
    RECOMPUTE,
    RECOMPUTE_KEEP_ATTENTION,
    RECOMPUTE_OFFLOAD,
    GroupChoice,
    ShardedDecisions,
    ShardingHost,
)

HOST_NAME = "mindspeed-mm"
_RECOMPUTED = (RECOMPUTE, RECOMPUTE_KEEP_ATTENTION, RECOMPUTE_OFFLOAD)
_OFFLOADED = (OFFLOAD, RECOMPUTE_OFFLOAD)
_LOSS_CHUNKS = (512, 1024, 2048, 4096)
_BATCH_CHUNKS = (1, 2, 4)


def sharding_host(config: NativeConfig, npu: bool = True) -> ShardingHost:
    """Return the trainer's capabilities for this file.

    Chunked loss and chunked micro batches are choices only if the file has their plans: the model's code has to support
    them. Attention outputs are kept for all recomputed layers or for none, by one switch of the model.
    """
    recompute = RECOMPUTE_KEEP_ATTENTION if config.features.keep_attention else RECOMPUTE
    loss, batch = "features.chunkloss_plan.chunk_size", "features.chunkmbs_plan.chunk_mbs"
    chosen = {config.features.chunk_loss_size, config.values.integer(loss, 0), *_LOSS_CHUNKS}
    return ShardingHost(
        name=HOST_NAME,
        variant="mindspeed-mm",
        policies=(KEEP, recompute, OFFLOAD, RECOMPUTE_OFFLOAD),
        # Heads are exchanged only inside flash attention.
        ulysses=config.values.text("model.attn_implementation", "flash_attention_2").startswith("flash"),
        ring=npu,
        loss_chunks=tuple(sorted({0, *chosen})) if config.values.has(loss) else (0,),
        micro_batch_chunks=(0, *_BATCH_CHUNKS) if config.values.has(batch) else (0,),
        offload_optimizer=True,
        lists_units=True,
    )


def read_decisions(
    config: NativeConfig, modules: Sequence[ShardedModule], num_devices: int, npu: bool = True
) -> ShardedDecisions:
    """Return the file's decisions on ``num_devices`` devices for a model with ``modules`` (forward order).

    Raises ``ConfigError`` for settings that the trainer refuses, and for a list that wraps only some layers of a stack,
    which a plan cannot describe.
    """
    names = [module.name for module in modules if module.name]
    sizes = shard_sizes(config, num_devices, npu)
    check_modules(config, names)
    sharding, features = config.sharding, config.features
    recomputed, offloaded = matching_names(features.recompute, names), matching_names(features.offload, names)

    def policy(name: str) -> str:
        if name in offloaded:
            return RECOMPUTE_OFFLOAD if name in recomputed else OFFLOAD
        if name not in recomputed:
            return KEEP
        return RECOMPUTE_KEEP_ATTENTION if features.keep_attention else RECOMPUTE

    groups = [
        GroupChoice(
            pattern=pattern,
            reshard_after_forward=sharding.reshard_after_forward,
            forward_prefetch=sharding.forward_prefetch,
            backward_prefetch=sharding.backward_prefetch,
        )
        for pattern in (*_wrapped(config, modules), "")
    ]
    return ShardedDecisions(
        sizes=sizes,
        groups=tuple(groups),
        policies=policies_of(modules, policy),
        loss_chunk=features.chunk_loss_size,
        micro_batch_chunk=features.chunk_batch_size if features.chunk_batch_size < sizes.micro_batch_size else 0,
        chunked=_whole_stacks(config.values.texts("features.chunkmbs_plan.apply_modules"), modules),
        hooks=_whole_stacks(sharding.hook_modules, modules),
        offload_optimizer=sharding.cpu_offload,
    )


def _whole_stacks(listed: Sequence[str], modules: Sequence[ShardedModule]) -> tuple[str, ...]:
    """Return the patterns of layers that ``listed`` covers completely."""
    stacks = layers_of(modules)
    return tuple(pattern for pattern, layers in stacks.items() if matching_names(listed, layers) == tuple(layers))


def decided_values(
    config: NativeConfig, decisions: ShardedDecisions, modules: Sequence[ShardedModule]
) -> dict[str, Value]:
    """Return the dotted keys and values that set ``decisions`` in the file, without unchanged keys.

    Raises ``PlanError`` for decisions that one file of this trainer cannot hold: reshard or prefetch that differ
    between groups, attention outputs kept in some recomputed layers only.
    """
    groups = [group for group in decisions.groups if group.wrapped]
    shared = {(group.reshard_after_forward, group.forward_prefetch, group.backward_prefetch) for group in groups}
    if len(shared) > 1:
        raise PlanError(
            f"{config.path}: this trainer has one reshard and prefetch for all groups, the plan has {len(shared)}."
        )
    values = decided_sizes(config, decisions)
    names = [module.name for module in modules if module.name]
    wrapped = [group.pattern for group in groups if group.pattern]
    if wrapped != list(_wrapped(config, modules)):
        others = [one for one in config.sharding.apply_modules if not matching_names([one], names)]
        values["parallel.fsdp_plan.apply_modules"] = [*wrapped, *others]
    for reshard, forward, backward in shared:
        _change(values, "parallel.fsdp_plan.reshard_after_forward", reshard, config.sharding.reshard_after_forward)
        _change(values, "parallel.fsdp_plan.num_to_forward_prefetch", forward, config.sharding.forward_prefetch)
        _change(values, "parallel.fsdp_plan.num_to_backward_prefetch", backward, config.sharding.backward_prefetch)
    values |= _layer_values(config, decisions, modules)
    values |= _chunk_values(config, decisions, modules)
    return values


def _change(values: dict[str, Value], key: str, wanted: Value, present: Value) -> None:
    if wanted != present:
        values[key] = wanted


def decided_sizes(config: NativeConfig, decisions: ShardedDecisions) -> dict[str, Value]:
    """Return the keys that need no model: sizes, batch, and the place of parameters."""
    sizes, present, values = decisions.sizes, config.sizes, dict[str, Value]()
    world = sizes.num_devices
    shard = present.fully_shard or world
    _change(values, "parallel.fully_shard_parallel_size", sizes.fully_shard_size, shard)
    _change(values, "parallel.ulysses_parallel_size", sizes.ulysses_size, present.ulysses)
    _change(values, "parallel.ring_attention_size", sizes.ring_size, present.ring)
    _change(values, "parallel.expert_parallel_size", sizes.expert_size, present.expert)
    if sizes.expert_size > 1 or present.expert_fully_shard is not None:
        # Without expert parallelism the experts are sharded with their layers, regardless of this size.
        expert_shard = present.expert_fully_shard or max(1, world // sizes.expert_size)
        _change(values, "parallel.expert_fully_shard_parallel_size", sizes.expert_shard_size, expert_shard)
    if present.data is not None:
        _change(values, "parallel.data_parallel_size", world // sizes.context_size, present.data)
    _change(values, "training.micro_batch_size", sizes.micro_batch_size, present.micro_batch)
    _change(values, "training.gradient_accumulation_steps", sizes.accumulation, present.accumulation)
    _change(values, "parallel.fsdp_plan.cpu_offload", decisions.offload_optimizer, config.sharding.cpu_offload)
    return values


def _layer_values(
    config: NativeConfig, decisions: ShardedDecisions, modules: Sequence[ShardedModule]
) -> dict[str, Value]:
    values: dict[str, Value] = {}
    policies = {policy for layers in decisions.policies.values() for policy in layers}
    keeps = RECOMPUTE_KEEP_ATTENTION in policies
    if keeps and RECOMPUTE in policies:
        raise PlanError(f"{config.path}: this trainer keeps attention outputs in all recomputed layers or in none.")
    if keeps != config.features.keep_attention and policies & set(_RECOMPUTED):
        values["model.skip_flash_attn_recompute"] = keeps
    lists = (
        ("recompute", "recompute_plan", _RECOMPUTED, config.features.recompute),
        ("enable_activation_offload", "activation_offload_plan", _OFFLOADED, config.features.offload),
    )
    for switch, plan, meaning, present in lists:
        patterns = changed_list(decisions, modules, meaning, present)
        if patterns is not None:
            values[f"features.{switch}"] = bool(patterns)
        if patterns:
            values[f"features.{plan}.apply_modules"] = patterns
    return values


def _wrapped(config: NativeConfig, modules: Sequence[ShardedModule]) -> tuple[str, ...]:
    sharding = config.sharding
    where = f"{config.path}: parallel.fsdp_plan.apply_modules"
    return wrapped_patterns(where, sharding.apply_modules, sharding.ignored_modules, modules)


def _chunk_values(
    config: NativeConfig, decisions: ShardedDecisions, modules: Sequence[ShardedModule]
) -> dict[str, Value]:
    features, values = config.features, dict[str, Value]()
    if decisions.loss_chunk != features.chunk_loss_size:
        values["features.enable_chunk_loss"] = decisions.loss_chunk > 0
        if decisions.loss_chunk:
            values["features.chunkloss_plan.chunk_size"] = decisions.loss_chunk
    chunk = features.chunk_batch_size if features.chunk_batch_size < config.sizes.micro_batch else 0
    if decisions.micro_batch_chunk != chunk:
        values["features.enable_chunk_mbs"] = decisions.micro_batch_chunk > 0
        if decisions.micro_batch_chunk:
            values["features.chunkmbs_plan.chunk_mbs"] = decisions.micro_batch_chunk
    return values

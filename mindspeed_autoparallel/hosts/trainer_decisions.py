"""The decisions in files of other FSDP2 trainers, except sizes, and the values that set those of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mindspeed_autoparallel.errors import ConfigError, PlanError
from mindspeed_autoparallel.hosts.patterns import changed_list, layers_of, matching_names, policies_of, wrapped_patterns
from mindspeed_autoparallel.hosts.trainer_table import EMBEDDING, HEAD, LAYERS, UNTIED_EMBEDDING
from mindspeed_autoparallel.hosts.trainers import TrainerFile
from mindspeed_autoparallel.hosts.yaml_edit import Value
from mindspeed_autoparallel.profiles.sharded import ShardedModule
from mindspeed_autoparallel.spec.sharded import (
    ALL,
    EACH,
    KEEP,
    RECOMPUTE,
    GroupChoice,
    ShardedDecisions,
    ShardingHost,
    ShardSizes,
)

_FSDP2 = ("fsdp2", "")


def trainer_host(file: TrainerFile) -> ShardingHost:
    """Return the trainer's capabilities: switches without a key keep the values of its code."""
    keys = file.trainer
    _check(file)
    prefetches = bool(keys.forward_prefetch)
    return ShardingHost(
        name=keys.name,
        policies=(KEEP, RECOMPUTE)
        if keys.recompute or keys.recompute_modules or "recompute" in keys.words
        else (KEEP,),
        layer_choice=EACH if keys.recompute_modules else ALL,
        reshard_choices=(True, False) if keys.reshard else (keys.reshard_default,),
        root_stays=keys.root_stays,
        last_layer_stays=keys.last_layer_stays and file.values.at(_reshard_key(file)) is None,
        prefetch_depths=(0, 1, 2) if prefetches else (0,),
        hybrid_shard=bool(keys.fully_shard or keys.replicas) and not keys.shards_world,
        ulysses=bool(keys.ulysses or "ulysses_size" in keys.words) and file.tensor_size == 1,
        expert_parallel=bool(keys.expert) and keys.plans_experts and file.tensor_size == 1,
        lists_units=bool(keys.wrap),
        defers_reduction=bool(keys.deferred) and file.values.switch(keys.deferred, True),
        stays_gathered=_frees_once(file),
        ignores_whole_experts=keys.divided_experts_stay,
    )


def trainer_decisions(file: TrainerFile, modules: Sequence[ShardedModule], num_devices: int) -> ShardedDecisions:
    """Return the file's decisions on ``num_devices`` devices; ``ConfigError`` for settings that a plan cannot
    describe."""
    keys = file.trainer
    _check(file)
    recomputed = _recomputed(file, modules)
    sizes = file.sizes(num_devices)
    reshard = _reshards(file, sizes)
    depths = _depths(file)
    patterns = [*_wrapped(file, modules), ""]
    groups = [
        GroupChoice(
            pattern=pattern,
            reshard_after_forward=reshard and not (keys.root_stays and not pattern),
            forward_prefetch=depths[0],
            backward_prefetch=depths[1],
        )
        for pattern in patterns
    ]
    return ShardedDecisions(
        sizes=sizes,
        groups=tuple(groups),
        policies=policies_of(modules, lambda name: RECOMPUTE if name in recomputed else KEEP),
        offload_optimizer=_offloads(file),
    )


def trainer_values(
    file: TrainerFile, decisions: ShardedDecisions, modules: Sequence[ShardedModule]
) -> tuple[dict[str, Value], tuple[str, ...]]:
    """Return the dotted keys that set ``decisions`` in the file, and the additional words of the command line.

    Raises ``ConfigError`` or ``PlanError`` for a decision that neither can hold.
    """
    keys, present = file.trainer, trainer_decisions(file, modules, decisions.sizes.num_devices)
    values = file.size_values(decisions.sizes)
    if keys.older_strategy and file.values.text(keys.strategy) in ("", keys.older_strategy):
        values[keys.strategy] = _FSDP2[0]
    words = [
        word.format(getattr(decisions.sizes, name))
        for name, word in keys.words.items()
        if name != "recompute" and getattr(decisions.sizes, name) != getattr(present.sizes, name)
    ]
    chosen, before = decisions.groups[0], present.groups[0]
    reshards = _reshards(file, decisions.sizes) and not (keys.root_stays and not chosen.pattern)
    if chosen.reshard_after_forward != reshards:
        values[_reshard_key(file)] = chosen.reshard_after_forward
    values |= _depth_values(file, chosen, before)
    wrapped, listed = ([group.pattern for group in one.groups if group.pattern] for one in (decisions, present))
    # Without prefetch lists the order has no meaning.
    if keys.wrap and (wrapped != listed if chosen.forward_prefetch else set(wrapped) != set(listed)):
        values[keys.wrap] = wrapped
    recomputed = {policy for row in decisions.policies.values() for policy in row} - {KEEP}
    if recomputed - {RECOMPUTE}:
        raise PlanError(f"{file.path}: {keys.name} has no policy {min(recomputed - {RECOMPUTE})!r}.")
    if keys.recompute_modules:
        values |= _list_values(file, decisions, modules)
    elif decisions.policies != present.policies:
        if keys.recompute:
            values[keys.recompute] = bool(recomputed)
        else:
            words.append(keys.words["recompute"].format(bool(recomputed)))
    return values, tuple(words)


def _depths(file: TrainerFile) -> tuple[int, int]:
    """Return the prefetch depths in forward and backward."""
    keys, missing = file.trainer, (file.trainer.prefetch_default,) * 2
    if keys.prefetch_switch:
        if not file.values.switch(keys.prefetch_switch, False):
            return 0, 0
        missing = keys.prefetch_switched
    forward, backward = (
        file.values.integer(key, depth) if key else 0
        for key, depth in zip((keys.forward_prefetch, keys.backward_prefetch), missing, strict=True)
    )
    return forward, backward


def _depth_values(file: TrainerFile, chosen: GroupChoice, before: GroupChoice) -> dict[str, Value]:
    keys, depths = file.trainer, (chosen.forward_prefetch, chosen.backward_prefetch)
    present, values = (before.forward_prefetch, before.backward_prefetch), dict[str, Value]()
    if depths == present:
        return values
    if keys.prefetch_switch:
        values[keys.prefetch_switch] = any(depths)
        present = (-1, -1) if any(depths) and not any(present) else present
    if any(depths) or not keys.prefetch_switch:
        named = zip((keys.forward_prefetch, keys.backward_prefetch), depths, present, strict=True)
        values |= {key: depth for key, depth, old in named if depth != old}
    return values


def _list_values(file: TrainerFile, decisions: ShardedDecisions, modules: Sequence[ShardedModule]) -> dict[str, Value]:
    keys, switched = file.trainer, _switched(file)
    listed = file.values.texts(keys.recompute_modules) if switched else ()
    patterns = changed_list(decisions, modules, (RECOMPUTE,), listed)
    if patterns is None:
        return {}
    if keys.recompute and not patterns:
        return {keys.recompute: False}
    switch: dict[str, Value] = {keys.recompute: True} if keys.recompute and not switched else {}
    return {**switch, keys.recompute_modules: patterns}


def _check(file: TrainerFile) -> None:
    """Raise ``ConfigError`` for other sharding strategies, and for recomputation of single operators."""
    keys, values = file.trainer, file.values
    strategy = values.text(keys.strategy) if keys.strategy else ""
    if strategy not in (*_FSDP2, keys.older_strategy):
        raise ConfigError(f"{file.path}: {keys.strategy} is {strategy}; only fsdp2 is planned.")
    if keys.recompute and values.text(keys.recompute) == "selective":
        raise ConfigError(
            f"{file.path}: {keys.recompute} is selective: it recomputes single operators, a plan whole layers: "
            "set true or false."
        )


def _switched(file: TrainerFile) -> bool:
    key = file.trainer.recompute
    if not key:
        return file.trainer.recomputes or bool(file.trainer.recompute_modules)
    return file.values.text(key) == "full" or file.values.switch(key, False)


def _recomputed(file: TrainerFile, modules: Sequence[ShardedModule]) -> set[str]:
    names = [name for layers in layers_of(modules).values() for name in layers]
    if not _switched(file):
        return set()
    key = file.trainer.recompute_modules
    if not key:
        return set(names)
    listed = file.values.texts(key) or (("model.layers.{*}",) if file.trainer.recompute else ())
    return set(matching_names(listed, names))


def _wrapped(file: TrainerFile, modules: Sequence[ShardedModule]) -> tuple[str, ...]:
    keys = file.trainer
    listed = file.values.texts(keys.wrap) if keys.wrap else ()
    if listed:
        found = wrapped_patterns(f"{file.path}: {keys.wrap}", listed, (), modules)
        if not found:
            raise ConfigError(f"{file.path}: {keys.wrap} {', '.join(listed)} matches no module of the model.")
        return found

    def is_embedding(one: ShardedModule) -> bool:
        return one.name.endswith(("embed_tokens", "embedding"))

    kinds: dict[str, Callable[[ShardedModule], bool]] = {
        LAYERS: lambda one: one.is_layer,
        EMBEDDING: is_embedding,
        UNTIED_EMBEDDING: lambda one: is_embedding(one) and not one.is_tied,
        HEAD: lambda one: one.is_head,
    }
    return tuple(dict.fromkeys(one.pattern for one in modules if any(kinds[kind](one) for kind in keys.wraps)))


def _reshard_key(file: TrainerFile) -> str:
    keys = file.trainer.reshard
    return next((key for key in keys if file.values.has(key)), keys[0])


def _reshards(file: TrainerFile, sizes: ShardSizes) -> bool:
    """Return whether units are freed after forward at ``sizes``."""
    keys = file.trainer
    default = keys.reshard_default and not (keys.divided_experts_stay and sizes.expert_size > 1)
    return file.values.switch(_reshard_key(file), default) if keys.reshard else default


def _frees_once(file: TrainerFile) -> bool:
    keys, values = file.trainer, file.values
    once = bool(keys.frees_once) and values.switch(keys.frees_once, False)
    return once or (bool(keys.frees_each) and not values.switch(keys.frees_each, True))


def _offloads(file: TrainerFile) -> bool:
    value = file.values.at(file.trainer.offload) if file.trainer.offload else None
    return value not in (None, False, "false", "none", "None")

"""A configuration as Megatron's own flags, and the user's command line with it."""

from __future__ import annotations

import argparse
import contextlib
import copy
import io
import os
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_autoparallel.errors import flag_of
from mindspeed_autoparallel.runtime.flags.registration import plain_flag, without_unmeasured, words_whose_flag
from mindspeed_autoparallel.runtime.megatron.hybrid import OLD_ARGUMENT, PATTERN_ARGUMENT, hybrid_pattern
from mindspeed_autoparallel.runtime.megatron.layout_arguments import (
    EXPERT_TENSOR_ARGUMENT,
    GROUP_ARGUMENT,
    RECOMPUTE_ARGUMENTS,
    flag_words,
    recompute_arguments,
    sizes,
    stage_arguments,
)
from mindspeed_autoparallel.runtime.megatron.mindspeed import NOOP_ARGUMENT
from mindspeed_autoparallel.runtime.megatron.splits import SPLIT_ARGUMENTS, VIRTUAL_ARGUMENTS, clear_stages
from mindspeed_autoparallel.spec import Cluster, Layout
from mindspeed_autoparallel.spec.plan import Plan

_DISPATCHER = "moe_token_dispatcher_type"
_TUNED = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "micro_batch_size",
    "sequence_parallel",
    "use_distributed_optimizer",
    "overlap_grad_reduce",
    "overlap_param_gather",
    _DISPATCHER,
    "global_batch_size",
    *SPLIT_ARGUMENTS,
    *VIRTUAL_ARGUMENTS,
    "microbatch_group_size_per_virtual_pipeline_stage",
    *RECOMPUTE_ARGUMENTS,
    "recompute_activations",
    "use_megatron_fsdp",
    "data_parallel_sharding_strategy",
    PATTERN_ARGUMENT,
    OLD_ARGUMENT,
)
"""Arguments that a configuration sets; on the user's command line they are replaced."""
_SWITCHED = (
    "use_ascend_mc2",
    "tp_comm_overlap",
    "overlap_moe_expert_parallel_comm",
    "moe_flex_dispatcher_backend",
    "moe_enable_deepep",
    "swap_attention",
    "fine_grained_activation_offloading",
    "offload_modules",
    "ckpt_format",
    "megatron_fsdp_main_grads_dtype",
    "cp_comm_type",
    "suggested_communication_unit_size",
    NOOP_ARGUMENT,
    "num_layers",
)
"""Further arguments, set by switches of a configuration or by a split with empty layers."""
_KEPT = (
    *("micro_batch_size", "global_batch_size", "recompute_num_layers", *VIRTUAL_ARGUMENTS),
    *("expert_tensor_parallel_size", "tensor_model_parallel_size", "pipeline_model_parallel_size"),
)
"""Written even if they are 1: Megatron has other defaults, or the script may have another value."""
SETTABLE_FLAGS = frozenset([flag_of(name) for name in (*_TUNED, *_SWITCHED)] + ["--no-gradient-accumulation-fusion"])
"""The flags that a launch may add to those of the user's script; agents refuse all others."""
_CLUSTER = frozenset({"--nnodes", "--nproc-per-node", "--master-addr", "--master-port", "--node-rank"})
_TRACED_OTHERWISE = (
    *("--auto-parallel-plan", "--operator-plan", "--data-balance", "--order-microbatches"),
    *("--hetero-parallel", "--auto-parallel-hetero", "--hetero-model"),
    *("--hetero-encoder-mbs-scale", "--hetero-balance", "--hetero-memory"),
)
"""Flags of ours under which a model is traced otherwise; no other changes a trace."""


def values_of(
    plan: Plan, settings: Mapping[str, object], recompute: str, num_recomputed: int, arguments: argparse.Namespace
) -> dict[str, object]:
    """Return destinations and values of all arguments that the configuration sets, including switches that are off.

    ``arguments``: the host's; they determine the flags of an uneven split.
    """
    values: dict[str, object] = {**sizes(plan), "overlap_param_gather": plan.layout.overlap_parameter_gather}
    shared = getattr(arguments, EXPERT_TENSOR_ARGUMENT, None)
    if shared is not None:
        # If the script sets it, it is not searched, and every configuration was priced with it.
        values[EXPERT_TENSOR_ARGUMENT] = shared
    dispatcher = getattr(arguments, _DISPATCHER, None)
    if dispatcher is not None and plan.model.modules[0].num_experts:
        # The script's own dispatcher was traced, unless the settings name another one.
        values[_DISPATCHER] = dispatcher
    values |= settings
    module = plan.model.modules[0].name
    layers = plan.layers_of(module)
    if len(set(layers)) > 1 or hybrid_pattern(arguments):
        split = stage_arguments(plan, arguments)
        values |= {name: value for name, value in split.items() if value is not None}
    elif plan.layout.virtual_size > 1:
        values[VIRTUAL_ARGUMENTS[0]] = layers[0]
    return values | recompute_arguments(recompute, num_recomputed) | sharding_values(plan.layout)


def sharding_values(layout: Layout) -> dict[str, object]:
    """Return Megatron's arguments of a layout that shards gradients or parameters."""
    if layout.sharding is None:
        return {}
    return {
        "data_parallel_sharding_strategy": layout.sharding.strategy,
        "suggested_communication_unit_size": layout.sharding.communication_unit,
    }


def words_of(values: Mapping[str, object]) -> list[str]:
    """Return command line words; Megatron's defaults are left out."""
    return flag_words(values, _KEPT)


def with_configuration(argv: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return ``argv`` (script first) without the tuned flags and the tuning's own, followed by ``words``."""
    removed = _removed(words)

    def stays(name: str) -> bool:
        of_search = name.startswith(("--auto-tuning", "--auto-parallel-data"))
        ours = of_search or name in (*_CLUSTER, "--auto-parallel-calibrate")
        return name not in removed and not ours

    return [argv[0], *words_whose_flag(stays, argv[1:]), *words]


def flags_to_remove(argv: Sequence[str], words: Sequence[str]) -> list[str]:
    """Return the words that ``with_configuration`` removes from ``argv`` and that ``words`` do not set again.

    A user who appends ``words`` to an existing command has to remove these, because they would stay in force.
    """
    stale = _removed(words) - _flags(words)
    return words_whose_flag(lambda name: name in stale, argv[1:])


def without_places(words: Sequence[str]) -> list[str]:
    """Return words of a command line without flags that only name a path, or that the search varies anyway."""
    return without_unmeasured(words, _TRACED_OTHERWISE)


def launcher_words(cluster: Cluster, master_addr: str, master_port: int) -> list[str]:
    """Return the ``torchrun`` command of the cluster's first node; the other nodes use their own ``--node-rank``."""
    processes = ["--nproc-per-node", str(cluster.devices_per_node)]
    if cluster.num_nodes == 1:
        return ["torchrun", "--standalone", *processes]
    rendezvous = ["--node-rank", "0", "--master-addr", master_addr, "--master-port", str(master_port)]
    return ["torchrun", "--nnodes", str(cluster.num_nodes), *processes, *rendezvous]


def _removed(words: Sequence[str]) -> set[str]:
    """Return flags that a configuration decides, with dashes."""
    return {plain_flag("--" + name) for name in _TUNED} | _flags(words)


def _flags(words: Sequence[str]) -> set[str]:
    return {plain_flag(word) for word in words if word.startswith("--")}


def illegal(arguments: argparse.Namespace, values: Mapping[str, object], world_size: int) -> str:
    """Return why the host's own ``validate_args`` refuses the configuration; empty if it does not. ``arguments`` are
    not modified."""
    from megatron.training.arguments import validate_args

    tried = copy.deepcopy(arguments)
    clear_stages(tried)
    for name in (GROUP_ARGUMENT, "recompute_activations"):
        if hasattr(tried, name):
            setattr(tried, name, None)
    if PATTERN_ARGUMENT in values and hasattr(tried, OLD_ARGUMENT):
        setattr(tried, OLD_ARGUMENT, None)
    for name, value in values.items():
        setattr(tried, name, value)
    tried.rank, tried.world_size = 0, world_size
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            validate_args(tried, {})
    except (AssertionError, ValueError, RuntimeError, NotImplementedError, TypeError) as error:
        return str(error).strip() or type(error).__name__
    return ""


def environment_words(environment: Mapping[str, str]) -> list[str]:
    """Return the prefix of a command that sets ``environment``; variables with empty values are unset."""
    if not environment:
        return []
    unset = [word for name, value in environment.items() if not value for word in ("-u", name)]
    return ["env", *unset, *(f"{name}={value}" for name, value in environment.items() if value)]


@contextlib.contextmanager
def with_environment(environment: Mapping[str, str]) -> Iterator[None]:
    """Set ``environment`` within the block, as it would be in training."""
    before = {name: os.environ.get(name) for name in environment}
    _set_variables({name: value or None for name, value in environment.items()})
    try:
        yield
    finally:
        _set_variables(before)


def _set_variables(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value

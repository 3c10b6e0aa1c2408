"""Refuses layouts whose sizes do not divide, with the numbers and the rule."""

from __future__ import annotations

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError


def check_divisions(work: Workload) -> None:
    """Raise ``ConfigError`` if sizes do not divide."""
    _check_model(work)
    _check_batch(work)
    _check_experts(work)


def _check_model(work: Workload) -> None:
    model = work.model
    if model.heads % work.tensor_size:
        raise ConfigError(f"{model.heads} attention heads cannot be split over tp {work.tensor_size}.")
    if max(model.kv_heads, work.tensor_size) % min(model.kv_heads, work.tensor_size):
        raise ConfigError(f"{model.kv_heads} key-value heads and tp {work.tensor_size}: neither divides the other.")
    if model.ffn % work.tensor_size:
        raise ConfigError(f"ffn {model.ffn} cannot be split over tp {work.tensor_size}.")
    if work.offloaded_layers and work.pipeline_size > 1:
        raise ConfigError(
            f"train.cpu_offloading_num_layers {work.offloaded_layers} with pp {work.pipeline_size}: Megatron offloads "
            "activations of runs with one pipeline stage."
        )
    if work.virtual_size > 1 and work.pipeline_size == 1:
        raise ConfigError(f"vpp {work.virtual_size} needs pp above 1.")
    if work.context_size > 1 and model.sequence % (2 * work.context_size):
        raise ConfigError(f"sequence {model.sequence} cannot be split over 2 x cp {work.context_size}.")
    if work.sequence_parallel and (model.sequence // work.context_size) % work.tensor_size:
        raise ConfigError(
            f"sequence {model.sequence} cannot be split over tp {work.tensor_size} for sequence parallelism."
        )


def _check_batch(work: Workload) -> None:
    step = work.data_size * work.micro_batch
    if work.global_batch % step:
        below, above = work.global_batch // step * step, (work.global_batch // step + 1) * step
        nearest = f"the nearest are {below} and {above}" if below else f"the least is {above}"
        raise ConfigError(
            f"gbs {work.global_batch} is not a multiple of dp {work.data_size} x mbs {work.micro_batch}; {nearest}."
        )
    group = work.group_microbatches or work.pipeline_size
    if work.virtual_size > 1 and group == work.pipeline_size and work.num_microbatches % work.pipeline_size:
        raise ConfigError(
            f"vpp {work.virtual_size} needs microbatches ({work.num_microbatches}) to be a multiple of "
            f"pp {work.pipeline_size}."
        )
    if work.virtual_size > 1 and group < work.pipeline_size:
        raise ConfigError(f"microbatch_group_size {group} must be at least pp {work.pipeline_size}.")
    if work.virtual_size > 1 and (
        group > work.num_microbatches or 0 < work.num_microbatches % group < work.pipeline_size
    ):
        raise ConfigError(
            f"microbatch_group_size {group} of {work.num_microbatches} microbatches: it must be at most all of them, "
            f"and leave no remainder below pp {work.pipeline_size}."
        )


def _check_experts(work: Workload) -> None:
    model = work.model
    if work.expert_size > 1:
        if not model.num_experts:
            raise ConfigError(f"ep {work.expert_size} needs a model with experts.")
        if model.num_experts % work.expert_size:
            raise ConfigError(f"{model.num_experts} experts cannot be split over ep {work.expert_size}.")
    shards, ranks = work.expert_size * work.expert_tensor_size, work.data_size * work.context_size * work.tensor_size
    if model.num_experts and ranks % shards:
        raise ConfigError(
            f"ep {work.expert_size} x etp {work.expert_tensor_size} does not divide dp x cp x tp {ranks}."
        )
    if model.expert_ffn % work.expert_tensor_size:
        raise ConfigError(f"expert ffn {model.expert_ffn} cannot be split over etp {work.expert_tensor_size}.")

"""Refuses layouts whose sizes do not divide, with the numbers and the rule."""

from __future__ import annotations

from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.errors import ConfigError


def check_divisions(work: Workload) -> None:
    """Raise ``ConfigError`` where sizes do not divide."""
    _check_model(work)
    _check_batch(work)
    _check_experts(work)


def _check_model(work: Workload) -> None:
    model = work.model
    if model.heads % work.tensor:
        raise ConfigError(f"{model.heads} attention heads cannot be split over tp {work.tensor}.")
    if max(model.kv_heads, work.tensor) % min(model.kv_heads, work.tensor):
        raise ConfigError(f"{model.kv_heads} key-value heads and tp {work.tensor}: neither divides the other.")
    if model.ffn % work.tensor:
        raise ConfigError(f"ffn {model.ffn} cannot be split over tp {work.tensor}.")
    if work.virtual > 1 and work.pipeline == 1:
        raise ConfigError(f"vpp {work.virtual} needs pp above 1.")
    if work.context > 1 and model.sequence % (2 * work.context):
        raise ConfigError(f"sequence {model.sequence} cannot be split over 2 x cp {work.context}.")
    if work.sequence_parallel and (model.sequence // work.context) % work.tensor:
        raise ConfigError(f"sequence {model.sequence} cannot be split over tp {work.tensor} for sequence parallelism.")


def _check_batch(work: Workload) -> None:
    step = work.data * work.micro_batch
    if work.global_batch % step:
        below, above = work.global_batch // step * step, (work.global_batch // step + 1) * step
        nearest = f"the nearest are {below} and {above}" if below else f"the least is {above}"
        raise ConfigError(
            f"gbs {work.global_batch} is not a multiple of dp {work.data} x mbs {work.micro_batch}; {nearest}."
        )
    group = work.group_microbatches or work.pipeline
    if work.virtual > 1 and group == work.pipeline and work.num_microbatches % work.pipeline:
        raise ConfigError(
            f"vpp {work.virtual} needs microbatches ({work.num_microbatches}) to be a multiple of pp {work.pipeline}."
        )
    if work.virtual > 1 and group < work.pipeline:
        raise ConfigError(f"microbatch_group_size {group} must be at least pp {work.pipeline}.")


def _check_experts(work: Workload) -> None:
    model = work.model
    if work.expert > 1:
        if not model.num_experts:
            raise ConfigError(f"ep {work.expert} needs a model with experts.")
        if model.num_experts % work.expert:
            raise ConfigError(f"{model.num_experts} experts cannot be split over ep {work.expert}.")
    shards, ranks = work.expert * work.expert_tensor, work.data * work.context * work.tensor
    if model.num_experts and ranks % shards:
        raise ConfigError(f"ep {work.expert} x etp {work.expert_tensor} does not divide dp x cp x tp {ranks}.")
    if model.expert_ffn % work.expert_tensor:
        raise ConfigError(f"expert ffn {model.expert_ffn} cannot be split over etp {work.expert_tensor}.")

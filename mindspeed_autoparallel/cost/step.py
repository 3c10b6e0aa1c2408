"""Step time besides the pipeline: gradient reduction, optimizer, tied embeddings. Formulas S1-S3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.cost.collectives import (
    Fabric,
    all_gather_us,
    all_reduce_us,
    data_parallel_link,
    embedding_link,
    reduce_scatter_us,
)
from mindspeed_autoparallel.cost.memory import updated_parameter_bytes
from mindspeed_autoparallel.cost.placed import PlacedBlock
from mindspeed_autoparallel.cost.sharding import once_us
from mindspeed_autoparallel.profiles import DeviceCost, GradientExchange, Measurement
from mindspeed_autoparallel.spec import Cluster, Layout, Model


@dataclass(frozen=True, kw_only=True)
class PostPipelineTime:
    """Times of one pipeline rank after its last backward, in microseconds."""

    reduce_us: float
    """Of gradients; of all collectives if their model does not separate them."""
    gather_us: float = 0.0
    """Of trained parameters."""
    optimizer_us: float

    @property
    def data_parallel_us(self) -> float:
        """Return the time of reduction and gathering together."""
        return self.reduce_us + self.gather_us

    @property
    def total_us(self) -> float:
        """Return the sum of all parts."""
        return self.data_parallel_us + self.optimizer_us


def post_pipeline_time(
    blocks: Sequence[PlacedBlock], layout: Layout, cluster: Cluster, device: DeviceCost
) -> PostPipelineTime:
    """Return S1 gradient reduction and S2 optimizer step of a rank that holds ``blocks``, without S4 and S5.

    With the distributed optimizer: reduce-scatter of gradients and all-gather of trained parameters over DP x CP
    (expert state over its own group); without: one all-reduce. With a model of the nodes' network: the exposed
    part of both. Sharded gradients are reduced in every microbatch instead (``sharding``).
    """
    replicas = layout.data_size * layout.context_size
    link = data_parallel_link(layout, cluster, device)
    updated = updated_parameter_bytes(blocks, layout)
    fixed_us = device.optimizer_step_fixed_us + (device.pipeline_step_us if layout.pipeline_size > 1 else 0.0)
    optimizer_us = fixed_us + device.optimizer_step_us_per_byte * updated if updated else 0.0
    if updated and device.gradient_norm_us_per_byte:
        optimizer_us += device.gradient_norm_us_per_byte * _trained_bytes(blocks)
    if layout.sharding is not None:
        return PostPipelineTime(reduce_us=once_us(blocks, layout, link), optimizer_us=optimizer_us)
    if device.exchange is not None:
        exchanged_us = _exchange_us(blocks, layout, device.exchange)
        return PostPipelineTime(reduce_us=exchanged_us, optimizer_us=optimizer_us)
    reduce_us = gather_us = 0.0
    for group, states in (
        (replicas, [block.cost.dense for block in blocks]),
        (layout.expert_replicas, [block.cost.expert for block in blocks]),
    ):
        gradients = sum(state.gradient_bytes for state in states)
        trained = sum(state.parameter_bytes for state in states if state.gradient_bytes)
        if layout.distributed_optimizer:
            reduce_us += reduce_scatter_us(gradients, group, link)
            gather_us += all_gather_us(trained, group, link)
        else:
            reduce_us += all_reduce_us(gradients, group, link)
    return PostPipelineTime(reduce_us=reduce_us, gather_us=gather_us, optimizer_us=optimizer_us)


def _trained_bytes(blocks: Sequence[PlacedBlock]) -> int:
    return sum(
        state.parameter_bytes
        for block in blocks
        for state in (block.cost.dense, block.cost.expert)
        if state.gradient_bytes
    )


def _exchange_us(blocks: Sequence[PlacedBlock], layout: Layout, exchange: GradientExchange) -> float:
    """Return S1 over the nodes' network: the exposed time of reducing gradients and gathering trained parameters.

    Ranks of the dense group are ``tensor_size`` apart, those of the experts' group EP x ETP.
    """
    fabric = Fabric(**vars(exchange.network))
    dense, expert = ([getattr(block.cost, name) for block in blocks] for name in ("dense", "expert"))
    total_us = 0.0
    for states, ranks, stride in (
        (dense, layout.data_size * layout.context_size, layout.tensor_size),
        (expert, layout.expert_replicas, layout.expert_size * layout.ranks_of_expert),
    ):
        gradients = exchange.sent_share * sum(state.gradient_bytes for state in states)
        trained = sum(state.parameter_bytes for state in states if state.gradient_bytes)
        if layout.distributed_optimizer:
            total_us += fabric.one_shot_us(gradients + trained, ranks, stride, replicas=True)
        else:
            total_us += fabric.all_reduce_us(gradients, ranks, stride, replicas=True)
    return total_us * (exchange.exposed_overlapped if layout.overlap_gradient_reduce else exchange.exposed)


def embedding_us(model: Model, measurement: Measurement, layout: Layout, cluster: Cluster, device: DeviceCost) -> float:
    """Return S3: all-reduce of the tied embedding's gradient between its two copies; 0 if there is one copy."""
    pre = measurement.modules[model.modules[-1].name].pre
    if not model.tied_embeddings or layout.pipeline_size == 1 or pre is None:
        return 0.0
    return all_reduce_us(pre.dense.gradient_bytes, 2, embedding_link(layout, cluster, device))

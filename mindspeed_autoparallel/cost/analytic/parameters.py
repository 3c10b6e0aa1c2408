"""Parameters of one pipeline rank, counted from the shapes."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.workload import Workload


@dataclass(frozen=True, kw_only=True)
class RankParameters:
    """Parameters on one rank: ``shared`` over all data-parallel ranks, ``expert`` over fewer."""

    shared: float
    expert: float


def padded_vocabulary(work: Workload) -> int:
    """Vocabulary as Megatron pads it: a multiple of 128 x tensor size."""
    multiple = 128 * work.tensor
    return -(-work.model.vocabulary // multiple) * multiple


def layer_parameters(work: Workload) -> RankParameters:
    """One transformer layer on one rank, biases and norms included."""
    model, tensor = work.model, work.tensor
    bias = not model.gated and not model.num_experts
    norm = (2 if bias else 1) * 2 * model.hidden
    shared = model.hidden * (2 * model.query_size + 2 * model.kv_size) / tensor + norm
    if bias:
        shared += (model.query_size + 2 * model.kv_size) / tensor + model.hidden
    products = 3 if model.gated else 2
    if not model.num_experts:
        shared += products * model.hidden * model.ffn / tensor
        if bias:
            shared += model.ffn / tensor + model.hidden
        return RankParameters(shared=shared, expert=0)
    shared += model.hidden * model.num_experts + products * model.hidden * model.shared_ffn / tensor
    expert = products * model.hidden * model.expert_ffn * model.num_experts / (work.expert * work.expert_tensor)
    return RankParameters(shared=shared, expert=expert)


def stage_parameters(work: Workload, stage: int) -> RankParameters:
    """Pipeline stage ``stage`` (from 0): its layers, and the embedding and head where they live."""
    layer = layer_parameters(work)
    layers = work.model.num_layers / work.pipeline
    table = padded_vocabulary(work) * work.model.hidden / work.tensor
    shared = layers * layer.shared
    classic = not work.model.gated and not work.model.num_experts
    if stage == 0:
        shared += table + (work.model.sequence * work.model.hidden if classic else 0)
    if stage == work.pipeline - 1:
        shared += (2 if classic else 1) * work.model.hidden
        # A tied head has a copy of the table of its own on a last stage that is not the first.
        if not (work.model.tied and stage == 0):
            shared += table
    return RankParameters(shared=shared, expert=layers * layer.expert)

"""Peak memory of each stage: parameters, gradients, optimizer, activations in flight, transients."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.parameters import padded_vocabulary, stage_parameters
from mindspeed_autoparallel.cost.analytic.workload import Workload

_MIB = 2**20
CONTEXT_BYTES = 500 * _MIB
"""What driver, kernels and communication buffers hold outside of the allocator; counts against what fits."""


@dataclass(frozen=True, kw_only=True)
class StageMemory:
    """Bytes on each rank of one stage; ``peak_bytes`` is what the allocator reports as most allocated."""

    parameter_bytes: float
    gradient_bytes: float
    optimizer_bytes: float
    activation_bytes: float
    transient_bytes: float
    workspace_bytes: float

    @property
    def peak_bytes(self) -> float:
        """Everything at the worst moment of a step."""
        return (
            self.parameter_bytes
            + self.gradient_bytes
            + self.optimizer_bytes
            + self.activation_bytes
            + self.transient_bytes
            + self.workspace_bytes
        )


def layer_activation_bytes(work: Workload) -> float:
    """Bytes that one layer saves for its backward pass, per microbatch.

    Unfused attention, GeLU and dropout: Korthikanti et al. 2022 (arXiv 2205.05198), table 2, with 34 = 10 replicated +
    24 split by the tensor size. Fused attention: the tensors that Transformer Engine saves, counted one by one.
    """
    model, tensor = work.model, work.tensor
    state = work.tokens * model.hidden * work.element_bytes
    split = tensor if work.sequence_parallel else 1
    if work.recompute == "full":
        return state / split
    if work.stack != "megatron-core":
        return state / 2 * (10 / split + 24 / tensor) + _attention_matrix_bytes(work)
    # Two norms keep input and output; the residual stream itself is one of those inputs.
    saved = 4 * state / split
    saved += work.tokens * (model.query_size + 2 * model.kv_size) * work.element_bytes / tensor
    saved += work.tokens * model.query_size * work.element_bytes / tensor
    saved += 4 * work.tokens * model.heads / tensor if work.fused_attention else _attention_matrix_bytes(work)
    products = 3 if model.gated else 2
    if not model.gated and not model.num_experts:
        saved += state  # two dropout masks of one byte each
    if not model.num_experts:
        return saved + products * work.tokens * model.ffn * work.element_bytes / tensor
    # Of each routed row: the experts' input and what is between their matrices; the router's weights join there, so the
    # output is not kept (megatron-core from 0.12).
    kept = model.hidden + (products + 2 * model.expert_clamp) * model.expert_ffn / work.expert_tensor
    saved += work.routed_rows * kept * work.element_bytes
    return saved + products * work.tokens * model.shared_ffn * work.element_bytes / tensor


def _attention_matrix_bytes(work: Workload) -> float:
    """Softmax, dropout mask and their product, where attention is neither fused nor computed again."""
    if work.fused_attention or work.recompute != "none":
        return 0.0
    return (2 * work.element_bytes + 1) * work.model.heads * work.tokens * work.model.sequence / work.tensor


def in_flight_layers(work: Workload, stage: int) -> float:
    """Layers whose activations stage ``stage`` holds at once, counted over microbatches.

    1F1B: ``pipeline - stage`` microbatches of the stage's layers. Interleaved: the first stage holds
    ``1 + (p - 1) / (p v)`` times all layers (Korthikanti et al. 2022, section 4.2.3), each later one two chunks less.
    """
    per_stage = work.model.num_layers / work.pipeline
    if work.virtual == 1:
        return per_stage * min(work.pipeline - stage, work.num_microbatches)
    chunks = work.pipeline * work.virtual + work.pipeline - 1 - 2 * stage
    limit = work.num_microbatches * work.virtual
    return per_stage / work.virtual * max(1, min(chunks, limit))


def backward_transient_bytes(work: Workload) -> float:
    """The largest weight gradient before it joins the fp32 buffer, and the widest gradients of one layer."""
    model, size = work.model, work.element_bytes
    products = 2 if model.gated else 1
    width = model.ffn / work.tensor
    if model.num_experts:
        width = model.expert_ffn * max(1, model.num_experts // work.expert) / work.expert_tensor
        rows = work.routed_rows
        gradients = 2 * rows * (products * model.expert_ffn / work.expert_tensor + model.hidden) * size
    else:
        gradients = products * work.tokens * width * size
    transient = 2 * products * model.hidden * width * size + gradients
    if work.stack != "megatron-core" or work.recompute == "full":
        again = layer_activation_bytes(_without_recompute(work)) if work.recompute == "full" else 0
        transient = max(transient, again + gradients)
    if work.context > 1:
        transient += 4 * work.tokens * model.hidden * size / work.tensor
    return transient


def _without_recompute(work: Workload) -> Workload:
    return dataclasses.replace(work, recompute="none")


def head_bytes(work: Workload) -> float:
    """Logits in the training precision, and the head's weight gradient; an fp32 copy without the fused loss.

    That copy becomes softmax and gradient in place, and is cast back once it is the gradient; the software of 2021
    wrote the exponentials to a second one.
    """
    logits = work.tokens * padded_vocabulary(work) / work.tensor
    table = padded_vocabulary(work) * work.model.hidden / work.tensor * work.element_bytes
    if work.cross_entropy_fusion:
        return logits * work.element_bytes + table
    return logits * (work.element_bytes + (4 if work.stack == "megatron-core" else 8))


def stage_memory(work: Workload, stage: int, workspace_bytes: float) -> StageMemory:
    """Peak of stage ``stage`` (from 0); ``workspace_bytes`` as the device's catalogue entry has them."""
    parameters = stage_parameters(work, stage)
    count = parameters.shared + parameters.expert
    size = work.element_bytes
    ranks = work.data * work.context
    optimizer = 12.0 * count
    if work.distributed_optimizer:
        optimizer = 12 * (parameters.shared / ranks + parameters.expert / work.expert_data)
    activation = layer_activation_bytes(work) * in_flight_layers(work, stage)
    transient = backward_transient_bytes(work)
    if stage == work.pipeline - 1:
        transient = max(transient, head_bytes(work)) if not work.cross_entropy_fusion else transient + head_bytes(work)
    if stage == 0:
        held = min(work.pipeline, work.num_microbatches)
        activation += held * work.tokens * work.model.hidden / (work.tensor if work.sequence_parallel else 1)
    return StageMemory(
        parameter_bytes=size * count,
        gradient_bytes=4.0 * count,
        optimizer_bytes=optimizer,
        activation_bytes=activation,
        transient_bytes=transient,
        workspace_bytes=workspace_bytes,
    )

"""Bytes of model state per parameter, and Megatron's fully sharded data parallelism: bytes on a rank, and bytes sent.

State is weights in a recipe's form, gradients, and what the optimizer keeps.
"""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.parameters import RankParameters, padded_vocabulary
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES, Workload
from mindspeed_autoparallel.cost.collectives import Fabric

_LAYERS_AT_ONCE = 2
"""Layers whose parameters are whole at once: the running layer and the next one (double buffer)."""
_SHOWN_AT_LEAST = 0.1
"""Least exposed share of the collectives: no computing hides the first gather and the last reduction. The value is that
of overlapped reductions of gradients on H100."""


def shards_of(work: Workload) -> tuple[float, float]:
    """Return the numbers of ranks over which shared and experts' parameters are sharded."""
    replicas = work.sharding_replicas
    return max(1.0, work.data_size * work.context_size / replicas), max(1.0, work.expert_data / replicas)


def gathered_layer_bytes(work: Workload, parameters: RankParameters) -> int:
    """Return the bytes of whole parameters and gradients that a rank holds at once, of layers like this one."""
    if work.sharding != "parameters":
        return 0
    count = parameters.shared + parameters.expert
    return round(_LAYERS_AT_ONCE * count * (work.element_bytes + work.gradient_bytes))


def shown_us(
    work: Workload, fabric: Fabric, parameters: RankParameters, forward_us: float, backward_us: float
) -> tuple[float, float]:
    """Return the time that gathering a layer's parameters and reducing its gradients adds to forward and backward.

    Parameters are gathered before the forward and again before the backward, in the recipe's form where they exist in
    it only; gradients are reduced after every backward. All of it overlaps the computing of neighbouring layers.
    """
    if work.sharding != "parameters":
        return 0.0, 0.0
    sent = OPERAND_BYTES[work.recipe] if work.recipe and work.quantized_parameters else float(work.element_bytes)
    shards, expert_shards = shards_of(work)
    stride = work.expert_size * work.expert_tensor_size

    def moved(each: float) -> float:
        time = fabric.one_shot_us(parameters.shared * each, int(shards), work.tensor_size, replicas=True)
        return time + fabric.one_shot_us(parameters.expert * each, int(expert_shards), stride, replicas=True)

    gathering, both = moved(sent), moved(sent + work.gradient_bytes)
    forward = max(_SHOWN_AT_LEAST * gathering, gathering - forward_us)
    return forward, max(_SHOWN_AT_LEAST * both, both - backward_us)


@dataclass(frozen=True, kw_only=True)
class ParameterBytes:
    """Bytes of one trained parameter on a rank, before any split over data-parallel ranks."""

    gathered: float
    """Of its stored form, what replicas gather after an update."""
    copies: float
    """Further copies that products read."""
    gradient: float
    optimizer: float

    @property
    def stored(self) -> float:
        """Return the bytes of all copies of its value."""
        return self.gathered + self.copies


def bytes_per_parameter(work: Workload, *, quantized: bool) -> ParameterBytes:
    """Return the bytes of a parameter of a matrix product (``quantized``) or of embedding and head."""
    stored = float(work.element_bytes)
    if quantized and work.recipe:
        stored += _quantized_extra(work)
    gathered = min(stored, float(work.element_bytes))
    return ParameterBytes(
        gathered=gathered, copies=stored - gathered, gradient=float(work.gradient_bytes), optimizer=work.optimizer_bytes
    )


def _quantized_extra(work: Workload) -> float:
    """Return the bytes of a quantized weight beyond those in the training precision.

    Eight-bit products of Hopper and block-scaled ones read a second copy of the weight along its columns; Blackwell's
    with one scale per tensor read the first one transposed (Transformer Engine, ``is_non_tn_fp8_gemm_supported``).
    """
    copies = 1 if work.recipe == "fp8" and not work.on_hopper else 2
    return copies * work.operand_bytes - (work.element_bytes if work.quantized_parameters else 0)


def in_flight(work: Workload, stage: int) -> float:
    """Return the number of microbatches whose activations stage ``stage`` holds at once.

    1F1B: ``pipeline - stage``. Interleaved: the first stage holds ``1 + (p - 1) / (p v)`` times all layers (Korthikanti
    et al. 2022, section 4.2.3), each later one two chunks less; larger groups of microbatches hold that many more.
    """
    if work.virtual_size == 1:
        return min(work.pipeline_size - stage, work.num_microbatches)
    group = work.group_microbatches or work.pipeline_size
    chunks = group * (work.virtual_size - 1) + 2 * (work.pipeline_size - stage) - 1
    limit = work.num_microbatches * work.virtual_size
    return max(1, min(chunks, limit)) / work.virtual_size


def in_flight_layers(work: Workload, stage: int) -> float:
    """Return the layers whose activations stage ``stage`` holds at once, counted over microbatches."""
    return work.stages[stage].num_layers * in_flight(work, stage)


def _largest_tensor(work: Workload, stage: int) -> float:
    """Return the elements of the largest tensor of a stage that one rank updates."""
    model, products = work.model, 2 if work.model.gated else 1
    if work.adapters:
        return 0.0
    ranks = work.data_size * work.context_size if work.distributed_optimizer else 1
    sizes = [model.hidden * products * model.ffn / work.tensor_size / ranks]
    if stage in (0, work.pipeline_size - 1):
        sizes.append(padded_vocabulary(work) * model.hidden / work.tensor_size / ranks)
    if model.num_experts:
        together = model.num_experts // work.expert_size if work.grouped_products else 1
        owners = work.expert_data if work.distributed_optimizer else 1
        sizes.append(together * model.expert_width * products * model.expert_ffn / work.expert_tensor_size / owners)
    return max(sizes)


def update_bytes(work: Workload, stage: int, optimizer_bytes: float) -> float:
    """Return the transient bytes of a stage's update: an fp32 copy of the largest tensor, and gradients in fp32.

    Two-byte gradients of a rank's shard are cast to fp32, unless the optimizer is precision-aware and they are bf16.
    ``optimizer_bytes``: those of a rank's state.
    """
    each = work.master_bytes + work.moment_bytes - 2.0 * work.shared_master_weights
    cast = work.half_precision or (work.reduced_in_two_bytes and each == 12)
    return 4.0 * _largest_tensor(work, stage) + (optimizer_bytes * 4 / each if cast else 0.0)

"""Memory of a run outside its blocks: the device's context, the transient of an update, layers in flight."""

from __future__ import annotations

from mindspeed_autoparallel.cost.analytic.parameters import padded_vocabulary
from mindspeed_autoparallel.cost.analytic.workload import Workload

_MIB = 2**20
CONTEXT_BYTES = 500 * _MIB
"""Bytes of driver, kernels and communication buffers outside the allocator, which reduce the usable memory."""
_RESERVED_SHARE = 0.06
"""Share of the memory that torch counts which no tensor gets: contexts, communicators' buffers, and the blocks that the
allocator reserves and cannot give out (docs/fsdp2.md has its sources)."""


def usable_bytes(counted_bytes: int) -> int:
    """Return the memory that a training's tensors may use of what torch counts on a device."""
    return int(counted_bytes * (1 - _RESERVED_SHARE))


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

"""Peak memory of each stage: parameters, gradients, optimizer, activations in flight, transients."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.activations import (
    backward_transient_bytes,
    encoder_activation_bytes,
    head_bytes,
    layer_activation_bytes,
)
from mindspeed_autoparallel.cost.analytic.parameters import (
    adapter_parameters,
    frozen_encoder_parameters,
    stage_parameters,
)
from mindspeed_autoparallel.cost.analytic.recomputing import split_layers
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


def in_flight(work: Workload, stage: int) -> float:
    """Return how many microbatches' activations stage ``stage`` holds at once.

    1F1B: ``pipeline - stage``. Interleaved: the first stage holds ``1 + (p - 1) / (p v)`` times all layers (Korthikanti
    et al. 2022, section 4.2.3), each later one two chunks less; larger groups of microbatches hold that many more.
    """
    if work.virtual == 1:
        return min(work.pipeline - stage, work.num_microbatches)
    group = work.group_microbatches or work.pipeline
    chunks = group * (work.virtual - 1) + 2 * (work.pipeline - stage) - 1
    limit = work.num_microbatches * work.virtual
    return max(1, min(chunks, limit)) / work.virtual


def in_flight_layers(work: Workload, stage: int) -> float:
    """Return the layers whose activations stage ``stage`` holds at once, counted over microbatches."""
    return work.stages[stage].num_layers * in_flight(work, stage)


def _activation_bytes(work: Workload, stage: int) -> float:
    """Return what the layers of a stage save for their backward passes, all microbatches in flight."""
    saved = 0.0
    for kind, recomputed, number in split_layers(work, stage):
        saved += number * layer_activation_bytes(work, kind, recomputed)
    place = work.stages[stage]
    if place.encoder_layers:
        saved += place.encoder_layers * encoder_activation_bytes(work)
    saved *= in_flight(work, stage)
    # Layers that predict further tokens live on the last stage, which holds one microbatch.
    return saved + place.mtp_layers * layer_activation_bytes(work, work.model.layers[-1], work.recompute == "full")


def _state_bytes(work: Workload, stage: int) -> tuple[float, float, float]:
    """Parameters, gradients and optimizer of a stage."""
    parameters = stage_parameters(work, stage)
    count, size = parameters.shared + parameters.expert, work.element_bytes
    frozen = frozen_encoder_parameters(work, stage) * size
    if work.adapters:
        layers = sum(number * adapter_parameters(work, kind) for kind, _, number in split_layers(work, stage) if number)
        ranks = work.data * work.context if work.distributed_optimizer else 1
        return size * (count + layers) + frozen, 4.0 * layers, 12.0 * layers / ranks
    ranks = work.data * work.context
    owned = count
    if work.distributed_optimizer:
        owned = parameters.shared / ranks + parameters.expert / work.expert_data
    # Moments and master weights; with shared master weights two bytes of these are the parameters' own.
    each = 0.0 if work.swapped_optimizer else 10.0 if work.shared_master_weights else 12.0
    copies = size
    if work.recipe:
        copies += 2  # eight-bit copies along rows and along columns
    if work.preference == "dpo":
        copies += size  # the frozen reference
    gradients = 4.0 * count
    return copies * count + frozen, gradients, each * owned


def stage_memory(work: Workload, stage: int, workspace_bytes: float) -> StageMemory:
    """Return the peak of stage ``stage`` (from 0); ``workspace_bytes`` as the device's catalogue entry has them."""
    parameter_bytes, gradient_bytes, optimizer_bytes = _state_bytes(work, stage)
    activation = _activation_bytes(work, stage)
    transient = backward_transient_bytes(work)
    if stage == work.pipeline - 1:
        head = head_bytes(work)
        transient = max(transient, head) if not work.cross_entropy_fusion else transient + head
    if stage == 0:
        held = min(work.pipeline, work.num_microbatches)
        activation += held * work.tokens * work.model.hidden / work.hidden_split
    return StageMemory(
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=optimizer_bytes,
        activation_bytes=activation,
        transient_bytes=transient,
        workspace_bytes=workspace_bytes,
    )

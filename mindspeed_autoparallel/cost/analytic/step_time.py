"""Time of one training step from layer times: pipeline, gradient communication, optimizer."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.collectives import Fabric
from mindspeed_autoparallel.cost.analytic.layer_time import LayerTime, head_time, layer_time
from mindspeed_autoparallel.cost.analytic.parameters import stage_parameters
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import Device, Efficiency


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """One step, in milliseconds, and where it goes."""

    total_ms: float
    pipeline_ms: float
    gradient_ms: float
    optimizer_ms: float
    fixed_ms: float
    bubble_fraction: float
    stage_ms: tuple[float, ...]
    """Forward plus backward of one microbatch on each stage."""


def one_f_one_b_us(stages: list[float], boundary_us: float, num_microbatches: int, virtual: int) -> float:
    """Length of the pipeline phase.

    One microbatch crosses all stages (fill and drain), the others follow at the pace of the slowest; interleaving
    divides the fill and drain by the number of model chunks. Source: Narayanan et al. 2021, section 2.2, for
    equal stages; the slowest stage sets the pace otherwise.
    """
    slowest = max(stages)
    crossing = sum(stages) + (len(stages) - 1) * boundary_us
    return slowest * num_microbatches + (crossing - slowest) / virtual + boundary_us * (virtual - 1) * (len(stages) > 1)


_EXPOSED_WHEN_OVERLAPPED = 0.1
"""Share of the reduction of gradients that shows in runs that overlap it; seven published on H100 say 0.09."""


def gradient_exposed(work: Workload, efficiency: Efficiency) -> float:
    """Share of the reduction of gradients that the backward pass does not hide."""
    if work.gradient_overlap is None:
        return efficiency.gradient_exposed
    return _EXPOSED_WHEN_OVERLAPPED if work.gradient_overlap else 1.0


def gradient_us(work: Workload, efficiency: Efficiency, fabric: Fabric, stage: int) -> float:
    """Reduction of the gradients (and gathering of parameters) of one stage that is not hidden."""
    parameters = stage_parameters(work, stage)
    ranks = work.data * work.context
    # Old software reduces in the training precision, newer in fp32 and gathers parameters in the training precision.
    gradient_bytes = 4 if work.stack == "megatron-core" else work.element_bytes
    expert_stride = work.expert * work.expert_tensor
    if work.distributed_optimizer:
        per_parameter = gradient_bytes + work.element_bytes
        time = fabric.one_shot_us(parameters.shared * per_parameter, ranks, work.tensor)
        time += fabric.one_shot_us(parameters.expert * per_parameter, work.expert_data, expert_stride)
    else:
        time = fabric.all_reduce_us(parameters.shared * gradient_bytes, ranks, work.tensor)
        time += fabric.all_reduce_us(parameters.expert * gradient_bytes, work.expert_data, expert_stride)
    return time * gradient_exposed(work, efficiency)


def optimizer_us(work: Workload, device: Device, efficiency: Efficiency, stage: int) -> float:
    """Adam over fp32 moments and master weights: about 30 bytes moved per parameter owned, after a norm pass."""
    parameters = stage_parameters(work, stage)
    ranks = work.data * work.context if work.distributed_optimizer else 1
    expert_ranks = work.expert_data if work.distributed_optimizer else 1
    owned = parameters.shared / ranks + parameters.expert / expert_ranks
    moved = owned * 30 + (parameters.shared + parameters.expert) * 6
    return moved / (device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction)


def boundary_send_us(work: Workload, fabric: Fabric) -> float:
    """Microseconds that one microbatch's hidden states take to the next stage, without the fixed cost.

    Sequence parallelism sends a share per tensor rank; so did the software of 2021 without it, which gathered the
    shares again inside the node ("scatter/gather", Narayanan et al. 2021, section 4.1). Otherwise every rank sends all.
    """
    size: float = work.tokens * work.model.hidden * work.element_bytes
    stride = work.num_devices // work.pipeline
    if work.sequence_parallel:
        return fabric.send_us(size / work.tensor, stride)
    if work.stack == "megatron-2021":
        return fabric.send_us(size / work.tensor, stride) + fabric.one_shot_us(size, work.tensor, 1)
    return fabric.send_us(size, stride)


def step_time(work: Workload, device: Device, layer: LayerTime | None = None) -> StepTime:
    """One step of ``work`` on ``device``; a measured ``layer`` replaces the modelled one."""
    efficiency = device.efficiency(work.stack)
    fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
    layer = layer or layer_time(work, device, efficiency, fabric)
    head = head_time(work, device, efficiency)
    layers = work.model.num_layers / work.pipeline
    stages = [layers * (layer.forward_us + layer.backward_us) for _ in range(work.pipeline)]
    stages[-1] += head.forward_us + head.backward_us
    boundary = 0.0
    if work.pipeline > 1:
        boundary = 2 * (efficiency.point_to_point_us + boundary_send_us(work, fabric))
        # Every microbatch waits for its neighbours' tensors: the boundary sits on the critical path of inner stages.
        stages = [stage + boundary for stage in stages[:-1]] + [stages[-1]]
    pipeline = one_f_one_b_us(stages, boundary, work.num_microbatches, work.virtual)
    ends = (0, work.pipeline - 1)
    gradient = max(gradient_us(work, efficiency, fabric, stage) for stage in ends)
    optimizer = max(optimizer_us(work, device, efficiency, stage) for stage in ends)
    total = pipeline + gradient + optimizer + efficiency.step_us
    busy = max(stages) * work.num_microbatches
    return StepTime(
        total_ms=total / 1e3,
        pipeline_ms=pipeline / 1e3,
        gradient_ms=gradient / 1e3,
        optimizer_ms=optimizer / 1e3,
        fixed_ms=efficiency.step_us / 1e3,
        bubble_fraction=max(0.0, 1 - busy / pipeline),
        stage_ms=tuple(stage / 1e3 for stage in stages),
    )

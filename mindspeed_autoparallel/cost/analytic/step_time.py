"""Time of one training step from layer times: pipeline, gradient communication, optimizer."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from mindspeed_autoparallel.cost.analytic.activations import layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.kernels import linear_us
from mindspeed_autoparallel.cost.analytic.layer_time import LayerTime, head_time, layer_time
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, ModelShape
from mindspeed_autoparallel.cost.analytic.parameters import adapter_parameters, layer_parameters, stage_parameters
from mindspeed_autoparallel.cost.analytic.states import shown_us
from mindspeed_autoparallel.cost.analytic.workload import OPERAND_BYTES, Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device, Efficiency

EXPOSED_WHEN_OVERLAPPED = 0.1
"""Exposed share of the gradient reduction in runs that overlap it; seven runs published on H100 have 0.09."""
HOST_LINK_GB_PER_S = 24.0
"""Default rate between a device and its host if the catalogue has none: PCIe 4 x16, measured in one direction."""
_HOST_MEMORY_GB_PER_S = 38.4
"""One device's share of its host's memory: eight channels of DDR5-4800 (307 GB/s, JEDEC) among eight devices."""
_ENCODER_LAYER = LayerKind("attention", "dense")


def one_f_one_b_us(stages: list[float], boundary_us: float, num_microbatches: int, virtual: int) -> float:
    """Return the length of the pipeline phase.

    One microbatch crosses all stages (fill and drain), the others follow at the pace of the slowest; interleaving
    divides the fill and drain by the number of model chunks. Source: Narayanan et al. 2021, section 2.2, for
    equal stages; the slowest stage sets the pace otherwise.
    """
    slowest = max(stages)
    crossing = sum(stages) + (len(stages) - 1) * boundary_us
    return slowest * num_microbatches + (crossing - slowest) / virtual + boundary_us * (virtual - 1) * (len(stages) > 1)


def gradient_exposed(work: Workload, efficiency: Efficiency) -> float:
    """Return the share of the reduction of gradients that the backward pass does not hide."""
    if work.gradient_overlap is None:
        return efficiency.gradient_exposed
    return EXPOSED_WHEN_OVERLAPPED if work.gradient_overlap else 1.0


def _trained(work: Workload, stage: int) -> tuple[float, float]:
    """Return the numbers of a stage's trained parameters: shared over all replicas, and experts'."""
    if work.adapters:
        count = sum(number * adapter_parameters(work, kind) for kind, _, number in split_layers(work, stage))
        return count, 0.0
    parameters = stage_parameters(work, stage)
    return parameters.shared, parameters.expert


def gradient_us(work: Workload, efficiency: Efficiency, fabric: Fabric, stage: int) -> float:
    """Return the time of reducing the gradients (and gathering parameters) of one stage that is not hidden."""
    shared, expert = _trained(work, stage)
    ranks = work.data_size * work.context_size
    # Old software reduces in the training precision, newer in fp32 and gathers parameters in the training precision.
    gradient_bytes = work.gradient_bytes if work.stack == "megatron-core" else work.element_bytes
    expert_stride = work.expert_size * work.expert_tensor_size
    if work.sharding == "parameters":
        return 0.0  # part of every microbatch
    if work.distributed_optimizer:
        per_parameter = gradient_bytes + _gathered_bytes(work)
        time = fabric.one_shot_us(shared * per_parameter, ranks, work.tensor_size, replicas=True)
        time += fabric.one_shot_us(expert * per_parameter, work.expert_data, expert_stride, replicas=True)
    else:
        time = fabric.all_reduce_us(shared * gradient_bytes, ranks, work.tensor_size, replicas=True)
        time += fabric.all_reduce_us(expert * gradient_bytes, work.expert_data, expert_stride, replicas=True)
    return time * gradient_exposed(work, efficiency)


def _gathered_bytes(work: Workload) -> float:
    """Return bytes per parameter that replicas gather after an update: the recipe's if no others exist.

    Block scales run along rows and along columns, so block-scaled copies are made from gathered two-byte ones.
    """
    per_tensor = work.recipe == "fp8" and work.quantized_parameters
    return OPERAND_BYTES["fp8"] if per_tensor else work.element_bytes


def optimizer_us(work: Workload, device: Device, efficiency: Efficiency, stage: int) -> float:
    """Return the time of Adam's update, by default 30 bytes per owned parameter, and of a pass for the norm."""
    shared, expert = _trained(work, stage)
    ranks = work.data_size * work.context_size if work.distributed_optimizer else 1
    expert_ranks = work.expert_data if work.distributed_optimizer else 1
    owned = shared / ranks + expert / expert_ranks
    rate = device.memory_bandwidth_gb_per_s * 1e3 * efficiency.optimizer_fraction
    return owned * update_us(work, device, rate) + (shared + expert) * 6 / rate


def update_us(work: Workload, device: Device, bytes_per_us: float) -> float:
    """Return the time of Adam's update of one parameter.

    Master weight and moments are read and written, the gradient is read, the parameter written.
    """
    state = work.master_bytes + work.moment_bytes
    time = (2 * state + work.gradient_bytes + work.element_bytes) * (1 - work.optimizer_on_host) / bytes_per_us
    link = (device.host_link_gb_per_s or HOST_LINK_GB_PER_S) * 1e3
    if work.swapped_optimizer:
        time += 2 * state / link  # in and out
    # Gradients go to the host and parameters come back; in between, the host's cores read and write the state.
    there = (4 + work.element_bytes) / link + (2 * state + 6) / (_HOST_MEMORY_GB_PER_S * 1e3)
    return time + work.optimizer_on_host * there


def boundary_send_us(work: Workload, fabric: Fabric) -> float:
    """Return the time that one microbatch's hidden states take to the next stage, without the fixed cost.

    Sequence parallelism sends a share per tensor rank; so did the software of 2021 without it, which gathered the
    shares again inside the node ("scatter/gather", Narayanan et al. 2021, section 4.1). Otherwise every rank sends all.
    """
    size: float = work.tokens * work.model.hidden * work.element_bytes
    stride = work.num_devices // work.pipeline_size
    if work.sequence_parallel:
        return fabric.send_us(size / work.tensor_size, stride)
    if work.stack == "megatron-2021":
        return fabric.send_us(size / work.tensor_size, stride) + fabric.one_shot_us(size, work.tensor_size, 1)
    return fabric.send_us(size, stride)


def encoder_workload(work: Workload) -> Workload:
    """Return the run of the encoder alone: a dense model of the encoder's sizes and tokens."""
    encoder = work.model.encoder
    assert encoder is not None
    model = ModelShape(
        num_layers=encoder.num_layers, hidden=encoder.hidden, heads=encoder.heads, kv_heads=encoder.heads,
        ffn=encoder.ffn, sequence=encoder.tokens, vocabulary=128, gated=encoder.gated, causal=False,
        layers=(_ENCODER_LAYER,),
    )  # fmt: skip
    return dataclasses.replace(work, model=model, adapters=None)


def encoder_layer_time(work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric) -> LayerTime:
    """Return the time of one encoder layer; a frozen one has no backward."""
    encoder = work.model.encoder
    assert encoder is not None
    time = layer_time(encoder_workload(work), device, efficiency, fabric, _ENCODER_LAYER)
    return LayerTime(forward_us=time.forward_us, backward_us=0.0 if encoder.frozen else time.backward_us)


def prediction_time(
    work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric, head: LayerTime
) -> LayerTime:
    """Return the time of multi-token prediction: a layer, the product that joins two hidden states, and the head."""
    layer = layer_time(work, device, efficiency, fabric, work.model.layers[-1])
    joined = linear_us(device, efficiency, work.tokens, 2 * work.model.hidden, work.model.hidden / work.tensor_size)
    return LayerTime(
        forward_us=layer.forward_us + joined.forward_us + head.forward_us,
        backward_us=layer.backward_us + joined.backward_us + head.backward_us,
    )


def stage_times_us(work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric) -> list[float]:
    """Return the time of forward plus backward of one microbatch on each stage, boundaries left out."""
    known: dict[tuple[LayerKind, bool], float] = {}

    def of(kind: LayerKind, recomputed: bool) -> float:
        if (kind, recomputed) not in known:
            time = layer_time(work, device, efficiency, fabric, kind, recomputed)
            reference = time.forward_us if work.preference == "dpo" else 0.0
            added = beside_layer(work, device, fabric, kind, time, not recomputed)
            known[kind, recomputed] = time.forward_us + time.backward_us + reference
            known[kind, recomputed] += added.forward_us + added.backward_us
        return known[kind, recomputed]

    head = head_time(work, device, efficiency)
    encoder_us = 0.0
    if work.model.encoder:
        own = encoder_layer_time(work, device, efficiency, fabric)
        encoder_us = own.forward_us + own.backward_us
    stages: list[float] = []
    for stage, place in enumerate(work.stages):
        time = sum(number * of(kind, recomputed) for kind, recomputed, number in split_layers(work, stage))
        if place.mtp_layers:
            # Their logits and losses are computed on the stage of the loss.
            nothing = LayerTime(forward_us=0.0, backward_us=0.0)
            ahead = prediction_time(work, device, efficiency, fabric, nothing)
            time += place.mtp_layers * (ahead.forward_us + ahead.backward_us)
        stages.append(time + place.encoder_layers * encoder_us)
    stages[-1] += (1 + work.model.mtp_layers) * (head.forward_us + head.backward_us)
    if work.preference == "dpo":
        stages[-1] += head.forward_us
    return stages


def beside_layer(
    work: Workload, device: Device, fabric: Fabric, kind: LayerKind, plain: LayerTime, kept: bool = True
) -> LayerTime:
    """Return the time that FSDP's collectives and the copies of saved activations to the host and back add to a layer,
    whose computing they overlap.

    ``kept``: whether the layer saves its activations; a recomputed one saves too little to wait for.
    """
    forward, backward = shown_us(work, fabric, layer_parameters(work, kind), plain.forward_us, plain.backward_us)
    if work.offloaded_layers and kept:
        link = (device.host_link_gb_per_s or HOST_LINK_GB_PER_S) * 1e3
        copied = layer_activation_bytes(work, kind) / link
        share = min(1.0, work.offloaded_layers * work.pipeline_size / work.model.num_layers)
        forward += share * max(0.0, copied - plain.forward_us)
        backward += share * max(0.0, copied - plain.backward_us)
    return LayerTime(forward_us=forward, backward_us=backward)


def closed_form_us(work: Workload, device: Device) -> float:
    """Return the time of one step in closed form, some fifty times faster than the simulator; never the price of a run.

    Only ratios between two devices are used, as slopes (fits, intervals, experiments); ``predict.price`` computes the
    step.
    """
    efficiency = device.efficiency(work.stack)
    fabric = Fabric.of(device, efficiency, work.devices_per_node, work.inter_node_gbit_per_s)
    stages = stage_times_us(work, device, efficiency, fabric)
    boundary = 0.0
    if work.pipeline_size > 1:
        boundary = 2 * (efficiency.point_to_point_us + boundary_send_us(work, fabric))
        # Every microbatch waits for its neighbours' tensors: the boundary sits on the critical path of inner stages.
        stages = [stage + boundary for stage in stages[:-1]] + [stages[-1]]
    pipeline = one_f_one_b_us(stages, boundary, work.num_microbatches, work.virtual_size)
    ends = (0, work.pipeline_size - 1)
    gradient = max(gradient_us(work, efficiency, fabric, stage) for stage in ends)
    optimizer = max(optimizer_us(work, device, efficiency, stage) for stage in ends)
    return pipeline + gradient + optimizer + efficiency.step_us


def run_again(work: Workload, stage: int) -> list[int]:
    """Return for each chunk of a stage the number of its first layers that are recomputed in full."""
    detail, numbers = work.recompute_detail, list[int]()
    left = detail.num_layers
    for chunk in work.stages[stage].chunks:
        again = 0
        if work.recompute == "full":
            again = len(chunk) if detail.method == "uniform" else min(left, len(chunk))
        if detail.per_rank:
            left -= again
        numbers.append(again)
    return numbers


def split_layers(work: Workload, stage: int) -> Iterator[tuple[LayerKind, bool, int]]:
    """Yield kind, whether they run again in full, and number of the decoder layers of a stage.

    Method ``block`` runs the first ``num_layers`` of each chunk again (of each rank with MindSpeed's
    ``recompute_per_pp_rank``), ``uniform`` all of them.
    """
    counted: Counter[tuple[LayerKind, bool]] = Counter()
    for chunk, again in zip(work.stages[stage].chunks, run_again(work, stage), strict=True):
        for index, kind in enumerate(chunk):
            counted[kind, index < again] += 1
    for (kind, recomputed), number in counted.items():
        yield kind, recomputed, number

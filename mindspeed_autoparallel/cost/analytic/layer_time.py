"""Forward and backward time of one layer, and of the head, for one microbatch on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.collectives import Fabric
from mindspeed_autoparallel.cost.analytic.kernels import attention_operations, linear_us, memory_pass_us
from mindspeed_autoparallel.cost.analytic.parameters import padded_vocabulary
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.catalogue import Device, Efficiency

_CORRECTION_WIDTH = 0.35
_CORRECTION_PRIOR = 0.02
_EXPERTS_AT_ONCE = 4
"""Streams over which Transformer Engine spreads the products of a rank's experts."""
_EXPOSED_WHEN_OVERLAPPED = 0.3
"""Share of tensor parallelism's collectives that shows in runs that overlap them; seven published on H100 say 0.28."""
_EXCHANGE_EXPOSED = 0.1
"""Share of experts' exchanges that shows at least where they overlap: the first and last microbatch have no other."""
_BIAS_PASSES = (14, 20)
"""Passes over an expert's output, in 2-byte elements, to add its bias (times the router's weight) to it and cast back,
forward and backward: counted in ``TEGroupedMLP._apply_bias``, which multiplies, adds and concatenates in fp32."""
_CLAMP_PASSES = (4, 5)
"""Passes over both halves of the gated activation's input to clamp and join them again, forward and backward."""


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Microseconds of one microbatch; ``backward_us`` includes what recompute runs again."""

    forward_us: float
    backward_us: float


def correction_key(work: Workload) -> tuple[float, float, float, float]:
    """Where a layer shape lies among measured ones: log2 of tokens, hidden, tensor size, heads per rank."""
    return (
        math.log2(work.tokens),
        math.log2(work.model.hidden),
        math.log2(work.tensor),
        math.log2(work.micro_batch * work.model.heads / work.tensor),
    )


def correction(efficiency: Efficiency, key: tuple[float, ...]) -> float:
    """Factor learnt from measured layers of about this shape; 1 far from all of them."""
    weights = total = 0.0
    for row in efficiency.corrections:
        distance = sum((a - b) ** 2 for a, b in zip(row[:4], key, strict=True))
        weight = math.exp(-distance / (2 * _CORRECTION_WIDTH**2))
        weights += weight
        total += weight * row[4]
    return math.exp(total / (weights + _CORRECTION_PRIOR))


def is_calibrated(efficiency: Efficiency, key: tuple[float, ...]) -> bool:
    """Whether a layer of about this shape was measured; true as well where a device has no layer corrections at all."""
    if not efficiency.corrections:
        return True
    nearest = min(sum((a - b) ** 2 for a, b in zip(row[:4], key, strict=True)) for row in efficiency.corrections)
    return nearest < _CORRECTION_WIDTH**2


def _join(host_us: float, device_us: float, norm: float) -> float:
    """Host and device work of one phase overlap: about the larger of the two."""
    return float((host_us**norm + device_us**norm) ** (1 / norm))


def _attention_us(work: Workload, device: Device, efficiency: Efficiency) -> tuple[float, float]:
    model = work.model
    width = model.query_size / work.tensor
    speed = device.peak_tflops * 1e6 * efficiency.attention_fraction
    operations = attention_operations(model.sequence, work.tokens, width, work.fused_attention and model.causal)
    if work.fused_attention:
        windowed = attention_operations(min(model.window, model.sequence), work.tokens, width, causal_fused=False)
        operations += model.windowed_share * (min(operations, windowed) - operations)
        return operations / speed, 2.5 * operations / speed
    heads = work.micro_batch * model.heads / work.tensor
    matrix = heads * model.sequence * model.sequence / work.context * work.element_bytes
    softmax = memory_pass_us(device, efficiency, matrix * efficiency.softmax_passes)
    if heads % 4:
        softmax *= 3  # the fused softmax kernel wants a multiple of four matrices
    return operations / speed + softmax, 2 * operations / speed + softmax


def _mlp_us(work: Workload, device: Device, efficiency: Efficiency) -> tuple[float, float]:
    model, tokens = work.model, work.tokens
    products = 2 if model.gated else 1

    def pair(rows: float, width: float, copies: int = 1) -> tuple[float, float]:
        first = linear_us(device, efficiency, rows, model.hidden, products * width, copies)
        second = linear_us(device, efficiency, rows, width, model.hidden, copies)
        between = memory_pass_us(device, efficiency, copies * rows * width * (products + 1) * work.element_bytes)
        return first[0] + second[0] + between, first[1] + second[1] + 2 * between

    if not model.num_experts:
        return pair(tokens, model.ffn / work.tensor)
    local = model.num_experts // work.expert
    together = min(local, _EXPERTS_AT_ONCE)
    forward, backward = pair(work.routed_rows / local, model.expert_ffn / work.expert_tensor, together)
    # One expert alone is a product like any other.
    rounds = local / together / (efficiency.expert_fraction if local > 1 else 1.0)
    forward, backward = forward * rounds, backward * rounds
    if model.shared_ffn:
        shared = pair(tokens, model.shared_ffn / work.tensor)
        forward, backward = forward + shared[0], backward + shared[1]
    moved = tokens * model.topk * model.hidden * work.element_bytes * 4 / work.tensor
    shuffle = memory_pass_us(device, efficiency, moved)
    aside = _beside_products_us(work, device, efficiency)
    return forward + shuffle + aside[0], backward + shuffle + aside[1]


def _beside_products_us(work: Workload, device: Device, efficiency: Efficiency) -> tuple[float, float]:
    """Forward and backward of what experts with biases and clamped activations do outside of fused kernels."""
    model = work.model
    row = 2 * work.model.expert_ffn / work.expert_tensor * model.expert_clamp, model.hidden * model.expert_bias
    passes = [clamp * row[0] + bias * row[1] for clamp, bias in zip(_CLAMP_PASSES, _BIAS_PASSES, strict=True)]
    forward, backward = (memory_pass_us(device, efficiency, work.routed_rows * size * 2) for size in passes)
    return forward, backward


def tensor_exposed(work: Workload, efficiency: Efficiency) -> float:
    """Share of tensor parallelism's collectives that products do not hide."""
    if work.tensor_overlap is None:
        return efficiency.tensor_exposed
    return _EXPOSED_WHEN_OVERLAPPED if work.tensor_overlap else 1.0


def _communication_us(work: Workload, efficiency: Efficiency, fabric: Fabric) -> float:
    """Collectives of one forward pass of a layer; a backward pass waits for as much (see ``_gathered_again_us``)."""
    model = work.model
    full = work.tokens * model.hidden * work.element_bytes
    # An all-reduce after attention and one after a dense or shared MLP, or with sequence parallelism an all-gather and
    # a reduce-scatter in place of each; routed experts have their own collectives, below.
    reduced = 2 if model.shared_ffn or not model.num_experts else 1
    time = tensor_exposed(work, efficiency) * reduced * fabric.all_reduce_us(full, work.tensor, 1)
    if work.context > 1:
        keys = 2 * work.tokens * model.kv_size / work.tensor * work.element_bytes
        ring = (work.context - 1) * fabric.send_us(keys, work.tensor)
        time += 0.5 * ring  # the other half hides behind attention of the block before
    if work.expert_tensor > 1 and model.num_experts:
        rows = work.routed_rows * model.hidden * work.element_bytes
        time += 2 * fabric.one_shot_us(rows, work.expert_tensor, 1)
    return time


def _exchange_us(work: Workload, fabric: Fabric) -> float:
    """Sending tokens to their experts and back, once in each direction of a layer."""
    if work.expert == 1:
        return 0.0
    sent = work.routed_rows / work.expert_tensor * work.model.hidden * work.element_bytes
    return 2 * fabric.dispatch_us(sent, work.expert, work.expert_tensor, work.model.topk)


def _gathered_again_us(work: Workload, fabric: Fabric) -> float:
    """What a backward pass gathers beyond a forward pass: the inputs of both column-parallel products, kept in shares.

    Today's software hides that behind the products for the input's gradient.
    """
    if not work.sequence_parallel or work.stack == "megatron-core":
        return 0.0
    return 2 * fabric.one_shot_us(work.tokens * work.model.hidden * work.element_bytes, work.tensor, 1)


def layer_time(work: Workload, device: Device, efficiency: Efficiency, fabric: Fabric) -> LayerTime:
    """One transformer layer."""
    model, tokens, size = work.model, work.tokens, work.element_bytes
    qkv = linear_us(device, efficiency, tokens, model.hidden, (model.query_size + 2 * model.kv_size) / work.tensor)
    out = linear_us(device, efficiency, tokens, model.query_size / work.tensor, model.hidden)
    mlp = _mlp_us(work, device, efficiency)
    attention = _attention_us(work, device, efficiency)
    # Norms, residual adds, dropout, bias: passes over the hidden state, fewer in newer software.
    passes = 10 if work.stack == "megatron-core" else 14
    split = work.tensor if work.sequence_parallel else 1
    elementwise = memory_pass_us(device, efficiency, passes * tokens * model.hidden * size / split)
    communication = _communication_us(work, efficiency, fabric)
    device_forward = qkv[0] + out[0] + mlp[0] + attention[0] + elementwise + communication
    device_backward = qkv[1] + out[1] + mlp[1] + attention[1] + 1.5 * elementwise + communication
    device_backward += _gathered_again_us(work, fabric)
    exchange = _exchange_us(work, fabric)
    shown = (exchange, exchange)
    if work.expert_overlap:
        left = _EXCHANGE_EXPOSED * exchange
        shown = max(left, exchange - device_backward), max(left, exchange - device_forward)
    device_forward, device_backward = device_forward + shown[0], device_backward + shown[1]
    host = efficiency.launch_us + efficiency.tensor_launch_us * (work.tensor - 1)
    if model.num_experts:
        host *= 2
    if not work.fused_attention and (work.micro_batch * model.heads // work.tensor) % 4:
        host += efficiency.unfused_softmax_us
    forward = _join(host, device_forward, efficiency.overlap_norm)
    backward = _join(2 * host, device_backward, efficiency.overlap_norm)
    if work.recompute == "full":
        backward += forward
    elif work.recompute == "selective":
        backward += attention[0]
    factor = correction(efficiency, correction_key(work))
    return LayerTime(forward_us=forward * factor, backward_us=backward * factor)


def head_time(work: Workload, device: Device, efficiency: Efficiency) -> LayerTime:
    """Output projection and loss of one microbatch."""
    width = padded_vocabulary(work) / work.tensor
    product = linear_us(device, efficiency, work.tokens, work.model.hidden, width)
    passes = memory_pass_us(device, efficiency, work.tokens * width * work.element_bytes * efficiency.head_passes)
    return LayerTime(forward_us=product[0] + passes, backward_us=product[1] + passes)

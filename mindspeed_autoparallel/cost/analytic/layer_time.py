"""Forward and backward time of one layer, and of the head, for one microbatch on one rank."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.kernels import Times, linear_us, memory_pass_us
from mindspeed_autoparallel.cost.analytic.mixers import Mixing, mixing
from mindspeed_autoparallel.cost.analytic.mlps import Widening, exchange_us, widening
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind, common_kind
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters, padded_vocabulary
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device, Efficiency

_EXCHANGE_EXPOSED = 0.1
"""Least exposed share of overlapped expert exchanges: the first and last microbatch have nothing to overlap with."""
_PASSES = {"megatron-core": 10, "megatron-2021": 14}
"""Passes over the hidden state for norms, residual adds, dropout and bias, by software."""
_DEPTH_BYTES = 40
"""Bytes per element of what attention over depth mixes, forward, as Kimi K3's ``_apply_attn_res`` runs it. No kernel
joins these: joined (2 read, 2 written), cast (2, 4), squared and summed (4, 4, 4), scaled twice and summed (4, 4, 4),
weighed (4) and 2 for the result of one."""
_NORM_PASSES = 4
"""Those of ``_PASSES`` that the two norms make: each reads and writes once."""
_UNFUSED_GRADIENT_BYTES = 10
"""Bytes per parameter and microbatch if products do not accumulate weight gradients: a two-byte gradient is read, the
buffer's four bytes are read and written."""
_SUM_BYTES = 4
"""Bytes of a token's sum of squares, in fp32."""
_FUSED_LOSS_PASSES = (3, 2)
"""Passes over the logits of Transformer Engine's loss. It reads them for their maximum, reads them again and writes
the gradient in their place. The backward scales the gradient (``cross_entropy.py`` at v2.9)."""
_ADAPTER_LAUNCHES = 0.5
_PLAIN = LayerKind("attention", "dense")


@dataclass(frozen=True, kw_only=True)
class LayerTime:
    """Microseconds of one microbatch; ``backward_us`` includes recomputation."""

    forward_us: float
    backward_us: float


def correction_key(work: Workload) -> tuple[float, float, float, float]:
    """Return the coordinates of a layer shape: log2 of tokens, hidden, tensor size, heads per rank."""
    return (
        math.log2(work.tokens),
        math.log2(work.model.hidden),
        math.log2(work.tensor_size),
        math.log2(work.sequences * work.model.heads / work.tensor_size),
    )


def correction(efficiency: Efficiency, key: tuple[float, ...]) -> float:
    """Return the factor fitted to measured layers of exactly this shape; 1 for every other."""
    return math.exp(efficiency.correction_of(key) or 0.0)


def is_calibrated(efficiency: Efficiency, key: tuple[float, ...]) -> bool:
    """Return whether a layer of this shape was measured; true also if a device has no corrections at all."""
    return not efficiency.corrections or efficiency.correction_of(key) is not None


def tensor_exposed(work: Workload, efficiency: Efficiency) -> float:
    """Return the share of tensor parallelism's collectives that products do not hide."""
    if work.tensor_overlap is None:
        return efficiency.tensor_exposed
    return efficiency.overlapped_exposed if work.tensor_overlap else 1.0


def _join(host_us: float, device_us: float, norm: float) -> float:
    """Return the time of a phase in which host and device work overlap: about the larger of the two."""
    largest = max(host_us, device_us)
    if largest <= 0:
        return 0.0
    return float(largest * ((host_us / largest) ** norm + (device_us / largest) ** norm) ** (1 / norm))


def _shown_us(work: Workload, efficiency: Efficiency, collectives_us: float, products_us: float) -> float:
    """Return the exposed time of tensor-parallel collectives that are pipelined with products.

    Of two that overlap, the longer remains, and the first and last piece of the shorter.
    """
    exposed = tensor_exposed(work, efficiency)
    if not work.tensor_overlap:
        return exposed * collectives_us
    return max(0.0, collectives_us - products_us) + exposed * min(collectives_us, products_us)


def _tensor_us(work: Workload, fabric: Fabric, kind: LayerKind) -> tuple[float, float]:
    """Return the time of tensor parallelism's collectives in a layer's forward pass: those that products can hide, and
    the experts' own.

    A backward pass waits for the same time.
    """
    model = work.model
    time = own = 0.0
    if work.tensor_size > 1:
        full = work.tokens * model.hidden * work.element_bytes
        # An all-reduce after the mixer and one after a dense or shared MLP, or with sequence parallelism an all-gather
        # and a reduce-scatter in place of each; routed experts have their own collectives, below.
        reduced = (kind.mixer != "none") + (kind.mlp == "dense" or (kind.mlp == "experts" and model.shared_ffn > 0))
        if work.tensor_grid:
            return _grid_us(work, fabric, kind)
        if work.sequence_parallel:
            # Gathered as the products read it, reduced and scattered in the training precision.
            each = fabric.one_shot_us(full * work.operand_bytes / work.element_bytes, work.tensor_size, 1)
            each += fabric.one_shot_us(full, work.tensor_size, 1)
        else:
            each = fabric.all_reduce_us(full, work.tensor_size, 1)
        time = reduced * each
    if kind.mlp == "experts" and work.expert_tensor_size > 1:
        rows = work.routed_rows * model.hidden * work.element_bytes
        own = 2 * fabric.one_shot_us(rows, work.expert_tensor_size, 1)
    return time, own


def _grid_us(work: Workload, fabric: Fabric, kind: LayerKind) -> tuple[float, float]:
    """Return the time of a layer's collectives on a grid of x by y tensor ranks, as in MindSpeed's
    ``Linear2DSplitAlongFirstDim``: those of products, and the norms' own.

    A product's input is gathered along one side, its output reduced and scattered along the other. A block's
    input and output are rows gathered over x, 1 / y of the hidden state wide; between its products the sides swap.
    Attention has the rows of all ranks of y: they exchange heads, as in Ulysses.
    """
    assert work.tensor_grid is not None
    (x, y), model = work.tensor_grid, work.model
    between: list[tuple[int, int]] = []
    if kind.mixer != "none":
        between.append((model.query_size + 2 * model.kv_size, model.query_size))
    if kind.mlp != "none":
        between.append(((2 if model.gated else 1) * model.ffn, model.ffn))
    rows = work.tokens * work.element_bytes
    time = own = 0.0
    if kind.mixer != "none":
        time = fabric.exchange_us(rows * 2 * (model.query_size + model.kv_size) / (x * y), y, x)
    for made, read in between:
        moved = (model.hidden / y, x, 1), (made / x, y, x), (read / x, y, x), (model.hidden / y, x, 1)
        time += sum(fabric.one_shot_us(rows * width, ranks, stride) for width, ranks, stride in moved)
        own += fabric.all_reduce_us(_SUM_BYTES * work.tokens / x, y, x)
    return time, own


def _gathered_again_us(work: Workload, fabric: Fabric) -> float:
    """Return the time of what a backward pass gathers beyond a forward pass: the inputs of both column-parallel
    products, kept in shares.

    Current software hides it behind the products of the input's gradient.
    """
    if not work.sequence_parallel or work.stack == "megatron-core":
        return 0.0
    return 2 * fabric.one_shot_us(work.tokens * work.model.hidden * work.element_bytes, work.tensor_size, 1)


def _weight_gradients_us(
    work: Workload, device: Device, efficiency: Efficiency, kind: LayerKind, weight_gradient_us: float
) -> float:
    """Return the time to compute weight gradients and add them to the buffer; for frozen matrices, those of the
    adapters."""
    if work.adapters:
        # Two thin products per adapted matrix, bound by reading the tokens.
        return memory_pass_us(device, efficiency, 8 * work.tokens * work.model.hidden * work.element_bytes)
    if work.fused_weight_gradients:
        return weight_gradient_us
    parameters = layer_parameters(work, kind)
    count = parameters.shared + parameters.expert
    return weight_gradient_us + memory_pass_us(device, efficiency, count * _UNFUSED_GRADIENT_BYTES)


def _again_us(work: Workload, mixed: Mixing, widened: Widening, norms_us: float) -> float:
    """Return the device time of selective recompute before a layer's backward."""
    modules = work.recompute_detail.modules if work.recompute == "selective" else ()
    again = 0.0
    again += mixed.core.forward_us * ("core_attn" in modules)
    again += mixed.up_us * ("mla_up_proj" in modules)
    if {"mlp", "moe"} & set(modules):
        again += widened.products.forward_us + widened.beside.forward_us
    elif "moe_act" in modules:
        again += widened.activation_us
    return again + norms_us * ("layernorm" in modules)


def layer_time(
    work: Workload,
    device: Device,
    efficiency: Efficiency,
    fabric: Fabric,
    kind: LayerKind | None = None,
    recomputed: bool | None = None,
) -> LayerTime:
    """Return the time of one layer of ``kind`` (the model's most frequent).

    ``recomputed``: whether all of it runs again before its backward; by default, as in the run's recompute.
    """
    kind = kind or common_kind(work.model.layers)
    recomputed = work.recompute == "full" if recomputed is None else recomputed
    model, tokens, size = work.model, work.tokens, work.element_bytes
    mixed = mixing(work, device, efficiency, fabric, kind)
    widened = widening(work, device, efficiency, kind)
    blocks = (kind.mixer != "none") + (kind.mlp != "none")
    passes = _PASSES[work.stack] * blocks / 2 + 2 * model.extra_norms
    elementwise = memory_pass_us(device, efficiency, passes * tokens * model.hidden * size / work.hidden_split)
    parts = mixed.projections.plus(mixed.core).plus(widened.products).plus(widened.beside)
    parts = parts.plus(Times(elementwise, 1.5 * elementwise))
    if model.residual_blocks:
        moved = blocks * _DEPTH_BYTES * model.residual_blocks * tokens * model.hidden / work.hidden_split
        depth = memory_pass_us(device, efficiency, moved)
        parts = parts.plus(Times(depth, 2 * depth))
    collectives, own = _tensor_us(work, fabric, kind)
    beside = mixed.projections.plus(widened.products)
    gradients = _weight_gradients_us(work, device, efficiency, kind, parts.weight_gradient_us)
    device_forward = parts.forward_us + own + mixed.exposed[0]
    device_forward += _shown_us(work, efficiency, collectives, beside.forward_us)
    device_backward = parts.input_gradient_us + gradients + own + mixed.exposed[1]
    device_backward += _shown_us(work, efficiency, collectives, beside.input_gradient_us)
    device_backward += _gathered_again_us(work, fabric)
    exchange = exchange_us(work, fabric) if kind.mlp == "experts" else 0.0
    shown = (exchange, exchange)
    if work.expert_overlap:
        left = _EXCHANGE_EXPOSED * exchange
        shown = max(left, exchange - device_backward), max(left, exchange - device_forward)
    device_forward, device_backward = device_forward + shown[0], device_backward + shown[1]
    host = _host_us(work, efficiency, mixed, widened)
    forward = _join(host, device_forward, efficiency.overlap_norm)
    backward = _join(2 * host, device_backward, efficiency.overlap_norm)
    if recomputed:
        backward += forward
    else:
        norms = elementwise * _NORM_PASSES / passes if passes else 0.0
        backward += _again_us(work, mixed, widened, norms)
    factor = correction(efficiency, correction_key(work)) if kind == _PLAIN else 1.0
    return LayerTime(forward_us=forward * factor, backward_us=backward * factor)


def _host_us(work: Workload, efficiency: Efficiency, mixed: Mixing, widened: Widening) -> float:
    """Return the host time to launch a layer's forward."""
    each = efficiency.launch_us + efficiency.tensor_launch_us * (work.tensor_size - 1)
    host = each * (mixed.launches + widened.launches + _ADAPTER_LAUNCHES * (work.adapters is not None))
    if not work.fused_attention and mixed.launches and (work.sequences * work.model.heads // work.tensor_size) % 4:
        host += efficiency.unfused_softmax_us
    experts = each * widened.expert_launches * (1 - work.replayed_launches * work.replays_experts)
    return host * (1 - work.replayed_launches) + experts


def head_time(work: Workload, device: Device, efficiency: Efficiency) -> LayerTime:
    """Return the time of output projection and loss of one microbatch."""
    width = padded_vocabulary(work) / work.tensor_size
    product = linear_us(device, efficiency, work.tokens, work.model.hidden, width)
    logits = memory_pass_us(device, efficiency, work.tokens * width * work.element_bytes)
    forward, backward = (efficiency.head_passes,) * 2
    if work.cross_entropy_fusion and work.stack == "megatron-core":
        forward, backward = _FUSED_LOSS_PASSES
    gradients = product.input_gradient_us if work.adapters else product.backward_us
    return LayerTime(forward_us=product.forward_us + forward * logits, backward_us=gradients + backward * logits)

"""MLPs of a layer, dense and expert, with the work outside their matrix products."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.cost.analytic.kernels import NOTHING, Times, linear_us, memory_pass_us
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device, Efficiency

_EXPERTS_AT_ONCE = 4
"""Streams over which Transformer Engine spreads the products of a rank's experts."""
_BIAS_PASSES = (14, 20)
"""Passes over an expert's output, in 2-byte elements, to add its bias (times the router's weight) to it and cast back,
forward and backward. Counted in ``TEGroupedMLP._apply_bias``, which multiplies, adds and concatenates in fp32."""
_CLAMP_PASSES = (4, 5)
"""Passes over both halves of the gated activation's input to clamp and join them again, forward and backward, if no
fused kernel does both."""
_ACTIVATION_PASSES = {"fused": 3, "gelu": 5, "gelu_tanh": 21}
"""Tensors as wide as a gated MLP that its activation function reads and writes; ``gelu_tanh`` takes nine kernels."""
_PADDING_PASSES = 4
"""Passes over routed rows, each direction, to pad each expert's to whole blocks of a recipe's scales and to cut its
output again: Transformer Engine's ``Fp8Padding`` and ``Fp8Unpadding`` read and write. HybridEP pads as it sends."""
_LATENT_LAUNCHES = 0.1
"""Host time of two products and a norm around experts in a latent space, in layers, which launch some twenty-five."""
_LAUNCHES_PER_EXPERT = 0.25
"""Host time of one expert that runs on its own, in layers of plain attention and a dense MLP: some five kernels."""


@dataclass(frozen=True, kw_only=True)
class Widening:
    """One MLP of one layer, in microseconds of one microbatch."""

    products: Times = NOTHING
    beside: Times = NOTHING
    """Activations, permutations, biases."""
    activation_us: float = 0.0
    """The activation function's forward, which selective recompute may repeat."""
    launches: float = 0.0
    expert_launches: float = 0.0
    """Launches from the dispatch of rows to experts to their return, which graphs of parts of a layer omit."""


def widening(work: Workload, device: Device, efficiency: Efficiency, kind: LayerKind) -> Widening:
    if kind.mlp == "none":
        return Widening()
    if kind.mlp == "dense":
        products, between = _pair(work, device, efficiency, work.tokens, work.model.ffn / work.tensor_size)
        return Widening(products=products, beside=Times(between, 2 * between), activation_us=between, launches=0.5)
    return _experts(work, device, efficiency)


def _pair(
    work: Workload,
    device: Device,
    efficiency: Efficiency,
    rows: float,
    width: float,
    copies: int = 1,
    fraction: float = 1.0,
    hidden: int = 0,
) -> tuple[Times, float]:
    """Return the times of both products, at ``fraction`` of a single one's speed, and of the activation's forward.

    ``hidden``: the width that they read and write; 0: the hidden state's.
    """
    factor = 2 if work.model.gated else 1
    hidden = hidden or work.model.hidden
    first = linear_us(device, efficiency, rows, hidden, factor * width, copies, work.recipe, fraction)
    second = linear_us(device, efficiency, rows, width, hidden, copies, work.recipe, fraction)
    passes = _ACTIVATION_PASSES[work.model.activation] if work.model.gated else factor + 1
    between = memory_pass_us(device, efficiency, copies * rows * width * passes * work.element_bytes)
    return first.plus(second), between


def _experts(work: Workload, device: Device, efficiency: Efficiency) -> Widening:
    model = work.model
    local = model.num_experts // work.expert_size
    together = min(local, _EXPERTS_AT_ONCE) if work.grouped_products else 1
    rows, width = work.routed_rows / local, model.expert_ffn / work.expert_tensor_size
    # One expert alone, or one after another, is a product like any other.
    fraction = efficiency.expert_fraction if local > 1 and work.grouped_products else 1.0
    products, between = _pair(work, device, efficiency, rows, width, together, fraction, model.expert_width)
    rounds = local / together
    products, between = products.times(rounds), between * rounds
    # Grouped products of a quantized recipe still launch each expert's quantization and product.
    alone = not work.grouped_products or bool(work.recipe)
    launches, expert_launches = 0.5, 1.0 + _LAUNCHES_PER_EXPERT * local * alone
    activation = between
    if model.shared_ffn:
        shared, passes = _pair(work, device, efficiency, work.tokens, model.shared_ffn / work.tensor_size)
        products, between, launches = products.plus(shared), between + passes, launches + 0.2
    if model.expert_hidden:
        into = linear_us(device, efficiency, work.tokens, model.hidden, model.expert_hidden, recipe=work.recipe)
        out = linear_us(device, efficiency, work.tokens, model.expert_hidden, model.hidden, recipe=work.recipe)
        products, launches = products.plus(into).plus(out), launches + _LATENT_LAUNCHES
    moved = work.tokens * model.topk * model.expert_width * work.element_bytes * 4 / work.tensor_size
    shuffle = memory_pass_us(device, efficiency, moved)
    if work.recipe and work.grouped_products and not efficiency.dispatch_fraction:
        padded = work.routed_rows * model.expert_width * work.element_bytes
        shuffle += memory_pass_us(device, efficiency, _PADDING_PASSES * padded)
    aside = _beside_products_us(work, device, efficiency)
    beside = Times(between + shuffle + aside[0], 2 * between + shuffle + aside[1])
    return Widening(
        products=products, beside=beside, activation_us=activation, launches=launches, expert_launches=expert_launches
    )


def _beside_products_us(work: Workload, device: Device, efficiency: Efficiency) -> tuple[float, float]:
    """Return forward and backward time of experts' biases and clamped activations outside of fused kernels."""
    model = work.model
    clamped = model.expert_clamp and not work.fused_activation
    row = 2 * model.expert_ffn / work.expert_tensor_size * clamped, model.expert_width * model.expert_bias
    passes = [clamp * row[0] + bias * row[1] for clamp, bias in zip(_CLAMP_PASSES, _BIAS_PASSES, strict=True)]
    forward, backward = (memory_pass_us(device, efficiency, work.routed_rows * size * 2) for size in passes)
    return forward, backward


def exchange_us(work: Workload, fabric: Fabric) -> float:
    """Return the time of sending tokens to their experts and back, once in each direction of a layer."""
    if work.expert_size == 1:
        return 0.0
    size, hidden = work.element_bytes, work.model.expert_width
    if work.gathered_experts:
        whole = work.tokens / work.hidden_split * work.expert_size * hidden * size
        return 2 * fabric.one_shot_us(whole, work.expert_size, work.expert_tensor_size)
    sent = work.routed_rows / work.expert_tensor_size * hidden * size
    if work.exchanged_per_expert:
        return 2 * fabric.exchange_us(sent, work.expert_size, work.expert_tensor_size)
    return 2 * fabric.dispatch_us(sent, work.expert_size, work.expert_tensor_size, work.model.topk)

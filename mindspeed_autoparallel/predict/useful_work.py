"""What a model needs to train on one sample, whatever the layout: operations, and parameters that are idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from mindspeed_autoparallel.cost.analytic.kernels import attention_operations
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.parameters import encoder_parameters, layer_parameters, prediction_parameters
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.device import Device

_PASSES, _FROZEN_PASSES = 3.0, 1.0
"""Forward and backward of a module that is trained cost three forwards; a frozen one in front runs forward alone."""


@dataclass(frozen=True, kw_only=True)
class UsefulWork:
    """Of one sample: what model FLOPs utilization (MFU) is counted by."""

    idle_parameters: float
    """Parameters of the experts that a token is not routed to."""
    operations: float
    """Forward and backward: 2 per parameter of a matrix and token, attention to earlier tokens only where the model is
    causal, head and loss of every predicted token; no recompute, no table look-ups."""


def useful_work(works: Sequence[Workload], frozen: Sequence[bool]) -> UsefulWork:
    """Return the work of a sample. ``works``: the modules without any parallelism, the text decoder last."""
    idle = operations = 0.0
    for work, is_frozen in zip(works, frozen, strict=True):
        passes = _FROZEN_PASSES if is_frozen else _PASSES
        for kind, number in Counter(work.model.layers).items():
            here = _active(work, kind)
            idle += number * (1 - _routed(work)) * layer_parameters(work, kind).expert
            operations += number * passes * (2 * _tokens(work) * here + _attention(work, kind))
        if work.model.encoder is not None:
            encoder, each = work.model.encoder, encoder_parameters(work)
            forward = 2 * encoder.tokens * each + attention_operations(
                encoder.tokens, encoder.tokens, encoder.hidden, causal_fused=False
            )
            operations += encoder.num_layers * forward * (_FROZEN_PASSES if encoder.frozen else _PASSES)
    text = works[-1]
    table = float(text.model.vocabulary * text.model.hidden)
    ahead = prediction_parameters(text)
    joined = ahead.shared + _routed(text) * ahead.expert
    idle += text.model.mtp_layers * (1 - _routed(text)) * ahead.expert
    head = table * (1 + text.model.mtp_layers) + joined * text.model.mtp_layers
    attended = text.model.mtp_layers * _attention(text, text.model.layers[-1])
    operations += _PASSES * (2 * _tokens(text) * head + attended)
    return UsefulWork(idle_parameters=idle, operations=operations)


def operations_of(work: Workload) -> float:
    """Return the operations of one sample of a described run, whatever its layout."""
    return useful_work([on_one_rank(work)], [False]).operations


def on_one_rank(work: Workload) -> Workload:
    """Return ``work`` with modules that no ranks share."""
    return replace(work, tensor_size=1, context_size=1, expert_size=1, expert_tensor_size=1)


def utilization(work: Workload, device: Device, step_us: float) -> float:
    """Return the share of the devices' 16-bit peak that a step of ``work`` reaches (MFU)."""
    operations = operations_of(work) * work.global_batch
    return operations / (step_us / 1e6 * work.num_devices * device.peak_tflops * 1e12)


def _tokens(work: Workload) -> float:
    return work.tokens / work.micro_batch


def _routed(work: Workload) -> float:
    """Return the share of the experts that compute a token."""
    return work.model.topk / work.model.num_experts if work.model.num_experts else 0.0


def _active(work: Workload, kind: LayerKind) -> float:
    layer = layer_parameters(work, kind)
    return layer.shared + _routed(work) * layer.expert


def _attention(work: Workload, kind: LayerKind) -> float:
    """Return operations of a layer's two attention products forward."""
    model, tokens = work.model, _tokens(work)
    if kind.mixer != "attention":
        return 0.0
    width = float(model.query_size)
    if model.latent:
        width = model.heads * (model.latent.query_size + model.latent.value_size) / 2
    reach = model.attention_reach
    if model.sparse:
        reach = min(reach, 2.0 * model.sparse.topk)  # halved below for a causal sequence
    whole = attention_operations(reach, tokens, width, model.causal)
    windowed = min(whole, attention_operations(min(model.window, reach), tokens, width, causal_fused=False))
    return whole + model.windowed_share * (windowed - whole)

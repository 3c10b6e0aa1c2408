"""Costs under ``fully_shard``, by formula: a decoder's layers, experts, embedding and head, and a device's links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_autoparallel.cost.analytic.activations import backward_transient_bytes, layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.layer_time import head_time, layer_time
from mindspeed_autoparallel.cost.analytic.memory import CONTEXT_BYTES
from mindspeed_autoparallel.cost.analytic.mixers import mixing
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier
from mindspeed_autoparallel.profiles.sharded import CostPoint, ModuleCosts, ModuleKind

_NO_EXCHANGE = Fabric(
    devices_per_node=1 << 20,
    link_bytes_per_us=1e15,
    link_latency_us=0.0,
    inter_bytes_per_us=1e15,
    inter_latency_us=0.0,
    exchange_bytes_per_us=1e15,
)
"""Exchanges are priced by the planner, for the sizes it tries."""
KEPT_PER_LOGIT = 10
"""Logits in two bytes, their fp32 copy, and the logarithm of the softmax: what transformers' loss keeps."""
TRANSIENT_PER_LOGIT = 8
"""The gradient in fp32 and what it is computed from."""


def joined_kinds(layers: Sequence[LayerKind]) -> tuple[LayerKind, ...]:
    """Return a mixer and the MLP behind it as the one layer that transformers has for both."""
    found: list[LayerKind] = []
    for kind in layers:
        if kind.mixer == "none" and found and found[-1].mlp == "none":
            found[-1] = LayerKind(found[-1].mixer, kind.mlp)
        else:
            found.append(kind)
    return tuple(found)


def decoder_kinds(
    works: Mapping[CostPoint, Workload], device: Device, *, stacked_experts: bool = True
) -> dict[str, ModuleKind]:
    """Return every kind of module of the decoder with its costs at all of ``works``' points.

    ``stacked_experts``: whether a layer's experts are rows of two tensors, which ``fully_shard`` cuts and pads.
    """
    whole = works[CostPoint()]
    model = whole.model
    kinds = {"root": ModuleKind(), "decoder": ModuleKind(parameters=(model.hidden,), costs=tuple(_norm(works)))}
    table = model.vocabulary * model.hidden
    kinds["embedding"] = ModuleKind(parameters=(table,), costs=tuple(_embedding(works)))
    own = () if model.tied else (table,)
    kinds["head"] = ModuleKind(parameters=own, costs=tuple(_head(works, device, table)))
    for kind in dict.fromkeys(joined_kinds(model.layers)):
        name = f"{kind.mixer} {kind.mlp}"
        counted = layer_parameters(whole, kind)
        kinds[name] = ModuleKind(
            parameters=(round(counted.shared),),
            costs=tuple(layer_costs(point, work, device, kind) for point, work in works.items()),
        )
        if kind.mlp == "experts":
            shapes = _expert_shapes(whole) if stacked_experts else ()
            kinds[f"{name}: experts"] = ModuleKind(
                parameters=tuple(math.prod(shape) for shape in shapes) or (round(counted.expert),),
                shapes=shapes,
                costs=tuple(_experts(point, work, device, kind) for point, work in works.items()),
            )
    return kinds


def _expert_shapes(work: Workload) -> tuple[tuple[int, ...], ...]:
    model = work.model
    first = (model.num_experts, model.hidden, (2 if model.gated else 1) * model.expert_ffn)
    return first, (model.num_experts, model.expert_ffn, model.hidden)


def _hidden_bytes(work: Workload) -> int:
    return work.tokens * work.model.hidden * work.element_bytes


def _norm(works: Mapping[CostPoint, Workload]) -> Iterator[ModuleCosts]:
    for point, work in works.items():
        hidden = _hidden_bytes(work)
        yield ModuleCosts(at=point, forward_us=0.0, backward_us=0.0, output_bytes=hidden, tail_kept_bytes=2 * hidden)


def _embedding(works: Mapping[CostPoint, Workload]) -> Iterator[ModuleCosts]:
    table = works[CostPoint()].model
    for point, work in works.items():
        gradient = table.vocabulary * table.hidden * work.element_bytes
        yield ModuleCosts(
            at=point,
            forward_us=0.0,
            backward_us=0.0,
            output_bytes=_hidden_bytes(work),
            backward_transient_bytes=gradient,
        )


def _head(works: Mapping[CostPoint, Workload], device: Device, table: int) -> Iterator[ModuleCosts]:
    for point, work in works.items():
        time = head_time(work, device, device.efficiency(work.stack))
        logits = work.tokens * work.model.vocabulary
        yield ModuleCosts(
            at=point,
            forward_us=time.forward_us,
            backward_us=time.backward_us,
            input_bytes=_hidden_bytes(work),
            kept_bytes=logits * KEPT_PER_LOGIT,
            backward_transient_bytes=max(logits * TRANSIENT_PER_LOGIT, table * work.element_bytes),
        )


def layer_costs(point: CostPoint, work: Workload, device: Device, kind: LayerKind) -> ModuleCosts:
    """Return a layer without its experts, which are a module of their own."""
    own = LayerKind(kind.mixer, "none") if kind.mlp == "experts" else kind
    efficiency, hidden = device.efficiency(work.stack), _hidden_bytes(work)
    time = layer_time(work, device, efficiency, _NO_EXCHANGE, own, recomputed=False)
    kept = max(0, round(layer_activation_bytes(work, own, recomputed=False)) - hidden)
    parameters = layer_parameters(work, own).shared * work.element_bytes
    core = mixing(work, device, efficiency, _NO_EXCHANGE, own).core
    attention = work.tokens * work.model.query_size * work.element_bytes if kind.mixer == "attention" else 0
    heads = work.tokens * (work.model.query_size * 2 + 2 * work.model.kv_size) * work.element_bytes
    return ModuleCosts(
        at=point,
        forward_us=time.forward_us,
        backward_us=time.backward_us,
        attention_us=core.forward_us if kind.mixer == "attention" else 0.0,
        output_bytes=hidden,
        input_bytes=hidden,
        kept_bytes=kept,
        attention_bytes=min(kept, attention),
        backward_transient_bytes=round(backward_transient_bytes(work, own) + parameters),
        made_gradient_bytes=round(parameters),
        ulysses_sent_bytes=heads if point.ulysses_size > 1 else 0,
    )


def _experts(point: CostPoint, work: Workload, device: Device, kind: LayerKind) -> ModuleCosts:
    efficiency = device.efficiency(work.stack)
    own = LayerKind(kind.mixer, "none")
    whole = layer_time(work, device, efficiency, _NO_EXCHANGE, kind, recomputed=False)
    rest = layer_time(work, device, efficiency, _NO_EXCHANGE, own, recomputed=False)
    saved = layer_activation_bytes(work, kind, recomputed=False) - layer_activation_bytes(work, own, recomputed=False)
    hidden = _hidden_bytes(work)
    gradients = layer_parameters(work, kind).expert * work.element_bytes
    return ModuleCosts(
        at=point,
        forward_us=max(0.0, whole.forward_us - rest.forward_us),
        backward_us=max(0.0, whole.backward_us - rest.backward_us),
        output_bytes=hidden,
        input_bytes=hidden,
        kept_bytes=max(0, round(saved) - hidden),
        backward_transient_bytes=round(backward_transient_bytes(work, kind) + gradients),
        made_gradient_bytes=round(gradients),
        expert_sent_bytes=round(work.routed_rows * work.model.hidden * work.element_bytes),
    )


def device_cost(device: Device, fabric: Fabric) -> DeviceCost:
    """Return memory and links of ``device``, for exchanges that the planner prices."""

    def tier(latency_us: float, bytes_per_us: float, exchange: float | None = None) -> LinkTier:
        link = Collective(latency_us=latency_us, bytes_per_s=bytes_per_us * 1e6)
        routed = {"all_to_all": Collective(latency_us=latency_us, bytes_per_s=exchange * 1e6)} if exchange else {}
        return LinkTier(default=link, operations=routed)

    return DeviceCost(
        memory_capacity_bytes=int(device.memory_gib * 2**30) - CONTEXT_BYTES,
        runtime_overhead_bytes=device.workspace_bytes,
        intra=tier(fabric.link_latency_us, fabric.link_bytes_per_us),
        inter=tier(
            fabric.inter_latency_us,
            fabric.inter_bytes_per_us / fabric.devices_per_node,
            fabric.exchange_bytes_per_us,
        ),
    )

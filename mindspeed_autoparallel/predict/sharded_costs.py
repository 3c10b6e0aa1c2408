"""Costs under ``fully_shard``, by formula: a decoder's layers, experts, embedding and head, and a device's links."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from mindspeed_autoparallel.cost.analytic.activations import backward_transient_bytes, layer_activation_bytes
from mindspeed_autoparallel.cost.analytic.kernels import memory_pass_us
from mindspeed_autoparallel.cost.analytic.layer_time import head_time, layer_time
from mindspeed_autoparallel.cost.analytic.mixers import mixing
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.parameters import layer_parameters
from mindspeed_autoparallel.cost.analytic.workload import Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.profiles import Collective, DeviceCost, LinkTier
from mindspeed_autoparallel.profiles.sharded import CostPoint, LogitBytes, ModuleCosts, ModuleKind

STACK = "megatron-core"
"""Whose efficiencies computed costs take."""
_NO_EXCHANGE = Fabric(
    devices_per_node=1 << 20,
    link_bytes_per_us=1e15,
    link_latency_us=0.0,
    inter_bytes_per_us=1e15,
    inter_latency_us=0.0,
    exchange_bytes_per_us=1e15,
)
"""Exchanges are priced by the planner, for the sizes it tries."""


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
    works: Mapping[CostPoint, Workload],
    device: Device,
    logits: LogitBytes,
    *,
    stacked_experts: bool = True,
    joined: bool = True,
) -> dict[str, ModuleKind]:
    """Return every kind of module of the decoder with its costs at all of ``works``' points.

    ``stacked_experts``: whether a layer's experts are rows of two tensors, which ``fully_shard`` cuts and pads;
    ``joined``: whether a mixer and the MLP behind it are one layer.
    """
    whole = works[CostPoint()]
    model = whole.model
    kinds = {"root": ModuleKind(), "decoder": ModuleKind(parameters=(model.hidden,), costs=tuple(_norm(works)))}
    table = -(-model.vocabulary // whole.tensor_size) * model.hidden
    kinds["embedding"] = ModuleKind(parameters=(table,), costs=tuple(_embedding(works, table)))
    own = () if model.tied else (table,)
    kinds["head"] = ModuleKind(parameters=own, costs=tuple(_head(works, device, table, logits)))
    for kind in dict.fromkeys(joined_kinds(model.layers) if joined else model.layers):
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
                costs=tuple(_experts(point, work, device, kind, stacked_experts) for point, work in works.items()),
            )
    return kinds


def _expert_shapes(work: Workload) -> tuple[tuple[int, ...], ...]:
    model = work.model
    first = (model.num_experts, model.expert_width, (2 if model.gated else 1) * model.expert_ffn)
    return first, (model.num_experts, model.expert_ffn, model.expert_width)


def _hidden_bytes(work: Workload) -> int:
    return work.tokens * work.model.hidden * work.element_bytes // work.hidden_split


def _fabric(work: Workload, device: Device) -> Fabric:
    """Return the links of tensor parallelism, the one exchange that is a layer's own; none without it."""
    if work.tensor_size == 1:
        return _NO_EXCHANGE
    return Fabric.of(device, device.efficiency(work.stack), work.devices_per_node, None)


def _norm(works: Mapping[CostPoint, Workload]) -> Iterator[ModuleCosts]:
    for point, work in works.items():
        hidden = _hidden_bytes(work)
        yield ModuleCosts(at=point, forward_us=0.0, backward_us=0.0, output_bytes=hidden, tail_kept_bytes=2 * hidden)


def _embedding(works: Mapping[CostPoint, Workload], table: int) -> Iterator[ModuleCosts]:
    for point, work in works.items():
        yield ModuleCosts(
            at=point,
            forward_us=0.0,
            backward_us=0.0,
            output_bytes=_hidden_bytes(work),
            backward_transient_bytes=table * work.element_bytes,
        )


def _head(works: Mapping[CostPoint, Workload], device: Device, table: int, held: LogitBytes) -> Iterator[ModuleCosts]:
    for point, work in works.items():
        time = head_time(work, device, device.efficiency(work.stack))
        # Tensor parallel ranks make slices of the logits; they gather them unless the loss takes slices.
        logits, fabric = work.tokens * work.model.vocabulary, _fabric(work, device)
        logits //= work.tensor_size if held.divided else 1
        whole = memory_pass_us(device, device.efficiency(work.stack), logits * work.element_bytes)
        slices = whole * device.efficiency(work.stack).head_passes * (1 - 1 / work.tensor_size)
        gathered = fabric.one_shot_us(logits * work.element_bytes, work.tensor_size, 1)
        if held.divided:
            slices, gathered = 0.0, 0.0
        yield ModuleCosts(
            at=point,
            forward_us=time.forward_us + slices + gathered,
            backward_us=time.backward_us + slices,
            input_bytes=_hidden_bytes(work),
            kept_bytes=logits * held.kept,
            backward_transient_bytes=max(logits * held.transient, table * work.element_bytes),
        )


def layer_costs(point: CostPoint, work: Workload, device: Device, kind: LayerKind) -> ModuleCosts:
    """Return a layer without its experts, which are a separate module."""
    own = LayerKind(kind.mixer, "none") if kind.mlp == "experts" else kind
    efficiency, hidden = device.efficiency(work.stack), _hidden_bytes(work)
    time = layer_time(work, device, efficiency, _fabric(work, device), own, recomputed=False)
    kept = max(0, round(layer_activation_bytes(work, own, recomputed=False)) - hidden)
    if kind.mixer == "attention" and not work.fused_attention:
        # transformers' eager attention computes its softmax in fp32, which is kept beside the cast matrix.
        kept += 4 * work.model.heads * work.tokens * work.model.sequence // work.tensor_size
    parameters = layer_parameters(work, own).shared * work.element_bytes
    core = mixing(work, device, efficiency, _NO_EXCHANGE, own).core
    attention = work.tokens * work.model.query_size * work.element_bytes // work.tensor_size
    attention *= kind.mixer == "attention"
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


def _experts(point: CostPoint, work: Workload, device: Device, kind: LayerKind, is_stacked: bool) -> ModuleCosts:
    efficiency = device.efficiency(work.stack)
    own = LayerKind(kind.mixer, "none")
    whole = layer_time(work, device, efficiency, _NO_EXCHANGE, kind, recomputed=False)
    rest = layer_time(work, device, efficiency, _NO_EXCHANGE, own, recomputed=False)
    saved = layer_activation_bytes(work, kind, recomputed=False) - layer_activation_bytes(work, own, recomputed=False)
    hidden = _hidden_bytes(work)
    gradients = layer_parameters(work, kind).expert * work.element_bytes
    indexed = work.model.num_experts // work.expert_size if is_stacked and not work.grouped_products else 0
    # The gradient of one indexed expert is as large as that of all: zeros are written, and then added to those before.
    passes = max(0, 4 * indexed - 3)
    return ModuleCosts(
        at=point,
        forward_us=max(0.0, whole.forward_us - rest.forward_us),
        backward_us=max(0.0, whole.backward_us - rest.backward_us)
        + memory_pass_us(device, efficiency, passes * gradients),
        output_bytes=hidden,
        input_bytes=hidden,
        kept_bytes=max(0, round(saved) - hidden),
        backward_transient_bytes=round(backward_transient_bytes(work, kind) + gradients * (1 + (indexed > 1))),
        made_gradient_bytes=round(gradients),
        expert_sent_bytes=round(work.routed_rows * work.model.expert_width * work.element_bytes),
    )


def device_cost(device: Device, fabric: Fabric, resident_bytes: int = 0) -> DeviceCost:
    """Return memory and links of ``device``, for exchanges that the planner prices; ``resident_bytes``: held beside
    what is planned."""

    def tier(latency_us: float, bytes_per_us: float, exchange: float | None = None) -> LinkTier:
        link = Collective(latency_us=latency_us, bytes_per_s=bytes_per_us * 1e6)
        routed = {"all_to_all": Collective(latency_us=latency_us, bytes_per_s=exchange * 1e6)} if exchange else {}
        return LinkTier(default=link, operations=routed)

    return DeviceCost(
        memory_capacity_bytes=device.usable_bytes,
        runtime_overhead_bytes=device.workspace_bytes + resident_bytes,
        intra=tier(fabric.link_latency_us, fabric.link_bytes_per_us),
        inter=tier(
            fabric.inter_latency_us, fabric.inter_bytes_per_us / fabric.devices_per_node, fabric.exchange_bytes_per_us
        ),
    )

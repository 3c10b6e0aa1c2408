"""Computed costs of a module's blocks: layers of every kind, embedding, head and multi-token prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection

from mindspeed_autoparallel.cost.analytic.activations import (
    backward_transient_bytes,
    encoder_activation_bytes,
    head_bytes,
    kept_share,
    layer_activation_bytes,
)
from mindspeed_autoparallel.cost.analytic.kernels import memory_pass_us
from mindspeed_autoparallel.cost.analytic.layer_time import LayerTime, head_time, layer_time
from mindspeed_autoparallel.cost.analytic.mlps import exchange_us
from mindspeed_autoparallel.cost.analytic.model_shape import LayerKind
from mindspeed_autoparallel.cost.analytic.parameters import (
    adapter_parameters,
    encoder_parameters,
    has_bias,
    layer_parameters,
    padded_vocabulary,
    prediction_parameters,
)
from mindspeed_autoparallel.cost.analytic.states import bytes_per_parameter, gathered_layer_bytes, shards_of
from mindspeed_autoparallel.cost.analytic.step_time import beside_layer, encoder_layer_time, prediction_time
from mindspeed_autoparallel.cost.analytic.workload import RECOMPUTE, Workload
from mindspeed_autoparallel.cost.collectives import Fabric
from mindspeed_autoparallel.cost.device import Device
from mindspeed_autoparallel.profiles import BlockCost, ModuleCost, RecomputeCost, StateBytes, mean_layer


def module_cost(
    work: Workload,
    device: Device,
    fabric: Fabric,
    frozen: bool,
    *,
    is_last: bool,
    alone: bool,
    recomputes: Collection[str] = RECOMPUTE,
) -> ModuleCost:
    """Return the blocks of a module on one rank at ``work``'s sizes; the last module has embedding, head and loss.

    ``alone``: it is the only module; layers of multi-token prediction are then a separate block. ``recomputes``: the
    policies to price, with ``none``.
    """
    # The placement lists the recomputed layers.
    work = dataclasses.replace(work, recompute="none")
    kinds = tuple(dict.fromkeys(work.model.layers))
    costs = tuple(_layer(work, device, fabric, frozen, kind, recomputes) for kind in kinds)
    pattern = tuple(kinds.index(kind) for kind in work.model.layers)
    if len(costs) == 1:
        module = ModuleCost(layer=costs[0])
    else:
        module = ModuleCost(layer=mean_layer(costs, pattern), kinds=costs, pattern=pattern)
    if not is_last:
        return module
    copy = _copy_of_embedding(work, frozen) if work.model.tied else StateBytes()
    module = dataclasses.replace(module, pre=_embedding(work, device, module.layer, frozen), tied_copy=copy)
    head = _head(work, device, module.layer, frozen)
    if not work.model.mtp_layers:
        return dataclasses.replace(module, post=head)
    prediction, post = _prediction(work, device, fabric, frozen), _with_heads(head, work.model.mtp_layers)
    if alone:
        return dataclasses.replace(module, prediction=prediction, post=post)
    return dataclasses.replace(module, post=_together(prediction, post))


def encoder_cost(work: Workload, device: Device, fabric: Fabric) -> ModuleCost:
    """Return the encoder's layers as a separate module."""
    encoder = work.model.encoder
    assert encoder is not None
    time = encoder_layer_time(work, device, device.efficiency(work.stack), fabric)
    saved = round(encoder_activation_bytes(work))
    tokens = work.sequences * encoder.tokens / work.context_size
    layer = BlockCost(
        forward_us=time.forward_us,
        backward_us=time.backward_us,
        recompute={"none": RecomputeCost(saved_bytes=saved)},
        output_bytes=round(tokens * encoder.hidden * work.element_bytes / _split(work)),
        dense=_state(work, encoder_parameters(work), encoder.frozen),
    )
    return ModuleCost(layer=layer)


def _state(
    work: Workload, count: float, frozen: bool, adapters: float = 0.0, *, quantized: bool = False, shards: float = 1.0
) -> StateBytes:
    """Return the state of ``count`` parameters, and of ``adapters`` trained ones if the run has adapters.

    ``quantized``: they belong to products, which a recipe may store in quantized forms; ``shards``: ranks that share
    them under FSDP.
    """
    number, size = round(count), work.element_bytes
    each = bytes_per_parameter(work, quantized=quantized)
    reference = size * number * (work.preference == "dpo")
    if frozen:
        return StateBytes(num_parameters=number, parameter_bytes=size * number, copy_bytes=reference)
    if work.adapters:
        trained = round(adapters)
        return StateBytes(
            num_parameters=number,
            parameter_bytes=size * trained,
            gradient_bytes=round(each.gradient * trained),
            optimizer_bytes=round(each.optimizer * trained),
            copy_bytes=round(each.stored * number) + reference,
        )
    held = shards if work.sharding == "parameters" else 1.0
    return StateBytes(
        num_parameters=number,
        parameter_bytes=round(each.gathered * number / held),
        gradient_bytes=round(each.gradient * number / (shards if work.sharding else 1.0)),
        optimizer_bytes=round(each.optimizer * number),
        copy_bytes=round(each.copies * number / held) + reference,
    )


def _layer(
    work: Workload, device: Device, fabric: Fabric, frozen: bool, layer: LayerKind, recomputes: Collection[str]
) -> BlockCost:
    parameters = layer_parameters(work, layer)
    efficiency = device.efficiency(work.stack)
    plain = layer_time(work, device, efficiency, fabric, layer)
    added = beside_layer(work, device, fabric, layer, plain)
    gathered = gathered_layer_bytes(work, parameters)
    kept = kept_share(work, -(-work.model.num_layers // work.pipeline_size))
    dense_shards, expert_shards = shards_of(work)
    output = round(work.tokens * work.model.hidden * work.element_bytes / _split(work))
    recompute = {}
    whole, transient = round(layer_activation_bytes(work, layer)), round(backward_transient_bytes(work, layer))
    for kind in recomputes:
        saved, extra_us = round(kept * layer_activation_bytes(work, layer)), 0.0
        if kind != "none":
            changed = dataclasses.replace(work, recompute=kind)
            saved = round(kept * layer_activation_bytes(changed, layer))
            extra_us = layer_time(changed, device, efficiency, fabric, layer).backward_us - plain.backward_us
        recompute[kind] = RecomputeCost(
            saved_bytes=saved,
            extra_backward_us=extra_us,
            forward_peak_bytes=whole - saved + gathered,
            # Recomputed tensors exist again before the layer's backward begins.
            backward_peak_bytes=whole - saved + transient + gathered,
        )
    if frozen:
        # Nothing before it is trained: no backward, and nothing is kept for one.
        recompute = {"none": RecomputeCost(saved_bytes=0, forward_peak_bytes=whole)}
    exchange = exchange_us(work, fabric) if layer.mlp == "experts" else 0.0
    adapters = adapter_parameters(work, layer) if work.adapters else 0.0
    # The frozen reference of preference training runs forward too.
    passes = 2 if work.preference == "dpo" else 1
    return BlockCost(
        forward_us=passes * plain.forward_us + added.forward_us,
        backward_us=0.0 if frozen else plain.backward_us + added.backward_us,
        forward_exchange_us=min(exchange, plain.forward_us),
        backward_exchange_us=0.0 if frozen else min(exchange, plain.backward_us),
        recompute=recompute,
        output_bytes=output,
        dense=_state(work, parameters.shared, frozen, adapters, quantized=True, shards=dense_shards),
        expert=_state(work, parameters.expert, frozen, quantized=True, shards=expert_shards),
    )


def _split(work: Workload) -> int:
    """Return the number of tensor ranks that share a stage's output and final norm; TP-2D cuts them along two dims."""
    return work.tensor_size if work.sequence_parallel or work.tensor_grid else 1


def _embedding(work: Workload, device: Device, layer: BlockCost, frozen: bool) -> BlockCost:
    look_up = memory_pass_us(device, device.efficiency(work.stack), 2 * layer.output_bytes)
    mask = round(work.tokens * work.model.hidden / work.hidden_split)
    positions = work.model.sequence * work.model.hidden if has_bias(work) else 0
    return BlockCost(
        forward_us=look_up,
        backward_us=0.0 if frozen else 2 * look_up,
        recompute={"none": RecomputeCost(saved_bytes=0 if frozen else mask, backward_peak_bytes=layer.output_bytes)},
        output_bytes=layer.output_bytes,
        dense=_state(work, _table(work) + positions, frozen, shards=_shards_of_ends(work)),
    )


def _head(work: Workload, device: Device, layer: BlockCost, frozen: bool) -> BlockCost:
    time = head_time(work, device, device.efficiency(work.stack))
    logits = round(work.tokens * padded_vocabulary(work) / work.tensor_size * work.element_bytes / work.loss_slices)
    shards = _shards_of_ends(work)
    head = _copy_of_embedding(work, frozen) if work.model.tied else _state(work, _table(work), frozen, shards=shards)
    norm = _state(work, (2 if has_bias(work) else 1) * work.model.hidden, frozen, shards=shards)
    reference_us = time.forward_us if work.preference == "dpo" else 0.0
    return BlockCost(
        forward_us=time.forward_us + reference_us,
        backward_us=time.backward_us,
        # The loss is computed in place of the logits; the final norm keeps its input and its output.
        recompute={
            "none": RecomputeCost(
                saved_bytes=logits + 2 * layer.output_bytes,
                backward_peak_bytes=max(0, round(head_bytes(work)) - logits) + layer.output_bytes,
            )
        },
        dense=_sum(norm, head),
    )


def _copy_of_embedding(work: Workload, frozen: bool) -> StateBytes:
    """Return the embedding's copy on another stage that reads it: it takes memory, but adds no parameters."""
    state = _state(work, _table(work), frozen, shards=_shards_of_ends(work))
    return dataclasses.replace(state, num_parameters=0)


def _shards_of_ends(work: Workload) -> float:
    """Return the number of ranks that share the gradients of embedding and head; under FSDP both are gathered once and
    stay whole.
    """
    return 1.0 if work.sharding == "parameters" else shards_of(work)[0]


def _table(work: Workload) -> float:
    return padded_vocabulary(work) * work.model.hidden / work.tensor_size


def _sum(first: StateBytes, second: StateBytes) -> StateBytes:
    names = [item.name for item in dataclasses.fields(StateBytes)]
    return StateBytes(**{name: getattr(first, name) + getattr(second, name) for name in names})


def _prediction(work: Workload, device: Device, fabric: Fabric, frozen: bool) -> BlockCost:
    """Return the layers that predict further tokens, without their logits and losses; none is recomputed."""
    number, layer, efficiency = work.model.mtp_layers, work.model.layers[-1], device.efficiency(work.stack)
    nothing = LayerTime(forward_us=0.0, backward_us=0.0)
    time = prediction_time(work, device, efficiency, fabric, nothing)
    own = prediction_parameters(work)
    dense = _state(work, number * own.shared, frozen, quantized=True)
    if not work.model.tied:
        # They read the embedding.
        dense = _sum(dense, _copy_of_embedding(work, frozen))
    output = round(work.tokens * work.model.hidden * work.element_bytes / _split(work))
    return BlockCost(
        forward_us=number * time.forward_us,
        backward_us=0.0 if frozen else number * time.backward_us,
        recompute={
            "none": RecomputeCost(
                saved_bytes=round(number * layer_activation_bytes(work, layer, False)),
                backward_peak_bytes=round(backward_transient_bytes(work, layer)),
            )
        },
        output_bytes=(1 + number) * output,
        dense=dense,
        expert=_state(work, number * own.expert, frozen, quantized=True),
    )


def _with_heads(head: BlockCost, further: int) -> BlockCost:
    """Return the output layer and loss, also run for each of the ``further`` tokens."""
    cost = head.recompute["none"]
    return dataclasses.replace(
        head,
        forward_us=(1 + further) * head.forward_us,
        backward_us=(1 + further) * head.backward_us,
        recompute={"none": dataclasses.replace(cost, saved_bytes=(1 + further) * cost.saved_bytes)},
    )


def _together(prediction: BlockCost, post: BlockCost) -> BlockCost:
    """Return both as one block, as in a measured profile."""
    before, cost = prediction.recompute["none"], post.recompute["none"]
    return dataclasses.replace(
        post,
        forward_us=prediction.forward_us + post.forward_us,
        backward_us=prediction.backward_us + post.backward_us,
        recompute={"none": dataclasses.replace(cost, saved_bytes=before.saved_bytes + cost.saved_bytes)},
        dense=_sum(prediction.dense, post.dense),
        expert=prediction.expert,
    )

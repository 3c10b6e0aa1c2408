"""Builds the planner's profile from the results of each layout."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from mindspeed_autoparallel.errors import ProfileError
from mindspeed_autoparallel.profiles import (
    BlockCost,
    DeviceCost,
    MeasuredAt,
    Measurement,
    ModuleCost,
    Profile,
    Provenance,
    RecomputeCost,
    SharedBytes,
    StateBytes,
    layer_block,
    mean_layer,
)
from mindspeed_autoparallel.profiles.profile import utc_now
from mindspeed_autoparallel.profiles.records import (
    BlockRecord,
    BytesPerParameter,
    ModelRecord,
    ModuleRecord,
    ParameterCount,
)
from mindspeed_autoparallel.redaction import masked_words
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.runtime.megatron.sends import interleaved_sends
from mindspeed_autoparallel.runtime.profiling.sources.analytic import useful_work_of
from mindspeed_autoparallel.runtime.profiling.sources.device_cost import with_peak
from mindspeed_autoparallel.spec.model import Model, Module


def build_profile(
    description: Description,
    results: Mapping[MeasuredAt, ModelRecord],
    device: DeviceCost,
    arguments: argparse.Namespace,
    provenance: Provenance,
    choices: Mapping[str, Sequence[Hashable]] | None = None,
) -> Profile:
    """Return a profile with every layout in ``results``; the full layer counts come from ``description``.

    ``arguments``: the host's, for the sizes of the model and the sends of its interleaved schedule. ``choices``: the
    flags' choice for every layer, by module; layers with equal choices have the kind of the first one.
    """
    first = next(iter(results.values()))
    described = {module.name: module.num_layers for module in description.modules}
    kinds = {
        item.name: _whole_kinds(item, described.get(item.name, 0), (choices or {}).get(item.name, ()))
        for item in first.modules
    }
    model = _model(description, first, arguments, kinds)
    num_tokens = {module.name: module.tokens_per_sample for module in model.modules}
    if (work := useful_work_of(arguments, description, num_tokens)) is not None:
        active = model.num_parameters - round(work.idle_parameters)
        model = replace(model, operations_per_sample=work.operations, num_active_parameters=active)
    return Profile(
        model=model,
        device=with_peak(device, provenance.device),
        measurements=tuple(
            Measurement(
                at=point,
                modules={item.name: _module_cost(item, result, kinds[item.name]) for item in result.modules},
                batch=_shared(result.batch_bytes),
                workspace_bytes=result.workspace_bytes,
            )
            for point, result in results.items()
        ),
        provenance=provenance,
        time_by_rows=dict(first.time_by_rows),
        interleaved_sends=interleaved_sends(arguments),
    )


def provenance_of(description: Description, source: str, device: str, software: dict[str, str]) -> Provenance:
    """Return the provenance of a profile that this process creates now."""
    return Provenance(
        source=source,
        device=device,
        created_utc=utc_now(),
        model_hash=description.model_hash,
        software=software,
        command=" ".join(masked_words([Path(sys.argv[0]).name, *sys.argv[1:]])),
    )


def _whole_kinds(item: ModuleRecord, num_layers: int, choices: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the kind of every layer of the whole module; empty if the measured layers do not determine them."""
    if len(item.kinds) == num_layers:
        return item.kinds
    return tuple(item.kinds[choices.index(choice)] for choice in choices)


def _model(
    description: Description,
    result: ModelRecord,
    arguments: argparse.Namespace,
    whole_kinds: Mapping[str, Sequence[int]],
) -> Model:
    described = {module.name: module for module in description.modules}
    names = [item.name for item in result.modules]
    if set(described) != set(names):
        raise ProfileError(
            f"the description has the modules {', '.join(described)}, the built model {', '.join(names)}; they must be "
            "the same. Give every module with layers a block of the name of its attribute in model.json."
        )
    modules = []
    total = 0
    for item in result.modules:
        layers = described[item.name].num_layers
        counts = {block: cost.parameters.num_parameters for block, cost in item.blocks.items()}
        kinds = [counts[layer_block(kind)] for kind in whole_kinds[item.name] or item.kinds]
        total += counts["pre"] + counts["post"] + layers * sum(kinds) // len(kinds)
        modules.append(
            Module(
                name=item.name,
                result_key=item.result_key,
                num_layers=layers,
                frozen=item.frozen,
                hidden_size=item.hidden_size,
                tokens_per_sample=item.tokens_per_sample,
                num_heads=item.num_heads,
                num_kv_heads=item.num_kv_heads,
                num_experts=item.num_experts,
                # Encoders are parallel branches into the last module.
                predecessors=tuple(names[:-1]) if item is result.modules[-1] else (),
                deepstack_layers=described[item.name].deepstack_layers,
            )
        )
    return Model(
        name=description.model_file.stem if description.model_file else "language_model",
        modules=tuple(modules),
        sequence_length=int(arguments.seq_length),
        vocab_size=int(getattr(arguments, "padded_vocab_size", None) or arguments.vocab_size or 0),
        tied_embeddings=result.tied_embeddings,
        num_parameters=total,
    )


def _module_cost(item: ModuleRecord, result: ModelRecord, pattern: tuple[int, ...]) -> ModuleCost:
    ratio, blocks = result.bytes_per_trained_parameter, item.blocks
    boundary = blocks["pre"].output_bytes or blocks["layer"].output_bytes
    kinds = tuple(_block(blocks[layer_block(kind)], ratio, boundary) for kind in range(len(set(item.kinds))))
    known = len(kinds) > 1 and bool(pattern)
    return ModuleCost(
        layer=mean_layer(kinds, pattern or item.kinds) if len(kinds) > 1 else kinds[0],
        kinds=kinds if known else (),
        pattern=pattern if known else (),
        pre=_block(blocks["pre"], ratio, None),
        post=_block(blocks["post"], ratio, None),
        side=_shared(item.side_bytes),
        input_bytes=item.input_bytes,
    )


def _shared(total_and_kept: tuple[int, int]) -> SharedBytes:
    return SharedBytes(total_bytes=total_and_kept[0], kept_bytes=total_and_kept[1])


def _block(block: BlockRecord, ratio: BytesPerParameter, input_bytes: float | None) -> BlockCost:
    """Return the costs of a block. ``input_bytes``: bytes of a layer's input; None for a block that is never
    recomputed."""
    saved, forward_peak = round(block.saved_bytes), round(block.forward_peak_bytes)
    backward_peak, output = round(block.backward_peak_bytes), round(block.output_bytes)
    recompute = {
        "none": RecomputeCost(saved_bytes=saved, forward_peak_bytes=forward_peak, backward_peak_bytes=backward_peak)
    }
    if input_bytes is not None:
        kept = min(saved, output)
        recompute["full"] = RecomputeCost(
            saved_bytes=kept,
            extra_backward_us=block.forward_us,
            # Without saved tensors, the forward's peak starts from a lower level.
            forward_peak_bytes=saved - kept + forward_peak,
            # All activations of the layer are recomputed before its backward begins.
            backward_peak_bytes=saved - kept + max(backward_peak, forward_peak),
        )
    return BlockCost(
        forward_us=block.forward_us,
        backward_us=block.backward_us,
        recompute=recompute,
        output_bytes=output,
        dense=_state(block.parameters.dense, ratio),
        expert=_state(block.parameters.expert, ratio),
    )


def _state(count: ParameterCount, ratio: BytesPerParameter) -> StateBytes:
    return StateBytes(
        num_parameters=count.num_parameters,
        parameter_bytes=count.parameter_bytes,
        gradient_bytes=round(count.num_trained * ratio.gradient),
        optimizer_bytes=round(count.num_trained * ratio.optimizer),
    )

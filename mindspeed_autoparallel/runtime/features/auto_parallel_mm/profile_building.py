"""From raw measurements to a profile the planner reads."""

from __future__ import annotations

import datetime
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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
    VariableData,
    layer_block,
    mean_layer,
)
from mindspeed_autoparallel.redaction import masked_words
from mindspeed_autoparallel.runtime.megatron.description import Description
from mindspeed_autoparallel.spec.model import Model, Module

_MIN_RELATIVE_SPREAD = 0.05


def build_profile(
    description: Description,
    results: Mapping[MeasuredAt, dict[str, Any]],
    device: DeviceCost,
    *,
    sequence_length: int,
    vocab_size: int,
    device_name: str,
    software: dict[str, str],
    interleaved_sends: str = "freed",
) -> Profile:
    """A profile of every point that was measured well; the full layer counts come from ``description``."""
    good = {point: result for point, result in results.items() if result["status"] == "ok"}
    first = next(iter(good.values()))
    layers = {module.name: module.num_layers for module in description.modules}
    model = _model(description, first, sequence_length, vocab_size)
    return Profile(
        model=model,
        device=device,
        measurements=tuple(
            Measurement(
                at=point,
                modules={item["name"]: _module_cost(item, result, layers[item["name"]]) for item in result["modules"]},
                batch=_shared(result.get("batch_bytes", (0, 0))),
                workspace_bytes=int(result.get("workspace_bytes", 0)),
            )
            for point, result in good.items()
        ),
        provenance=Provenance(
            source="measured",
            device=device_name,
            created_utc=datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            model_hash=description.model_hash,
            software=software,
            command=" ".join(masked_words([Path(sys.argv[0]).name, *sys.argv[1:]])),
        ),
        variable_data=_variable_data(first),
        interleaved_sends=interleaved_sends,
    )


def _model(description: Description, result: dict[str, Any], sequence_length: int, vocab_size: int) -> Model:
    described = {module.name: module for module in description.modules}
    built = {item["name"]: item for item in result["modules"]}
    if set(described) != set(built):
        raise ProfileError(
            f"the description has the modules {', '.join(described)}, the built model {', '.join(built)}; they must be "
            "the same. Give every module with layers a block of the name of its attribute in model.json."
        )
    names = list(built)
    modules = []
    total = 0
    for index, (name, item) in enumerate(built.items()):
        layers = described[name].num_layers
        counts = {block: _number(item["blocks"][block]["parameters"]) for block in item["blocks"]}
        kinds = [counts[layer_block(kind)] for kind in item["kinds"]]
        total += counts["pre"] + counts["post"] + layers * sum(kinds) // len(kinds)
        # Encoders run side by side into the last module, which joins them.
        is_last = index == len(names) - 1
        modules.append(
            Module(
                name=name,
                result_key=item["result_key"],
                num_layers=layers,
                frozen=item["frozen"],
                hidden_size=item["hidden_size"],
                tokens_per_sample=item["tokens_per_sample"],
                num_heads=item["num_heads"],
                num_kv_heads=item["num_kv_heads"],
                num_experts=item["num_experts"],
                predecessors=tuple(names[:-1]) if is_last else (),
            )
        )
    return Model(
        name=description.model_file.stem if description.model_file else "language_model",
        modules=tuple(modules),
        sequence_length=sequence_length,
        vocab_size=vocab_size,
        tied_embeddings=bool(result["tied_embeddings"]),
        num_parameters=total,
    )


def _number(parameters: dict[str, dict[str, int]]) -> int:
    return sum(kind["num_parameters"] for kind in parameters.values())


def _module_cost(item: dict[str, Any], result: dict[str, Any], num_layers: int) -> ModuleCost:
    ratio = result["bytes_per_trained_parameter"]
    blocks = item["blocks"]
    boundary = blocks["pre"]["output_bytes"] or blocks["layer"]["output_bytes"]
    pattern = tuple(item["kinds"])
    kinds = tuple(_block(blocks[layer_block(kind)], ratio, boundary) for kind in range(len(set(pattern))))
    # A reduced model alone does not tell where in the whole one its layers are.
    known = len(kinds) > 1 and len(pattern) == num_layers
    return ModuleCost(
        layer=mean_layer(kinds, pattern) if len(kinds) > 1 else kinds[0],
        kinds=kinds if known else (),
        pattern=pattern if known else (),
        pre=_block(blocks["pre"], ratio, None),
        post=_block(blocks["post"], ratio, None),
        side=_shared(item.get("side_bytes", (0, 0))),
    )


def _shared(total_and_kept: Sequence[int]) -> SharedBytes:
    return SharedBytes(total_bytes=total_and_kept[0], kept_bytes=total_and_kept[1])


def _block(block: dict[str, Any], ratio: dict[str, float], input_bytes: float | None) -> BlockCost:
    """``input_bytes``: of a layer, which full recompute keeps instead of everything else; None: not recomputable."""
    forward_us = float(block["forward_us"])
    saved = round(block["saved_bytes"])
    backward_peak = round(block["backward_peak_bytes"])
    recompute = {
        "none": RecomputeCost(
            saved_bytes=saved,
            forward_peak_bytes=round(block["forward_peak_bytes"]),
            backward_peak_bytes=backward_peak,
        )
    }
    if input_bytes is not None:
        kept = min(saved, round(block["output_bytes"]))
        recompute["full"] = RecomputeCost(
            saved_bytes=kept,
            extra_backward_us=forward_us,
            # Without saving, the forward's high point stands on less.
            forward_peak_bytes=saved - kept + round(block["forward_peak_bytes"]),
            # The layer's whole activations come back before its backward begins.
            backward_peak_bytes=saved - kept + max(backward_peak, round(block["forward_peak_bytes"])),
        )
    return BlockCost(
        forward_us=forward_us,
        backward_us=float(block["backward_us"]),
        recompute=recompute,
        output_bytes=round(block["output_bytes"]),
        dense=_state(block["parameters"]["dense"], ratio),
        expert=_state(block["parameters"]["expert"], ratio),
    )


def _state(count: dict[str, int], ratio: dict[str, float]) -> StateBytes:
    return StateBytes(
        num_parameters=count["num_parameters"],
        parameter_bytes=count["parameter_bytes"],
        gradient_bytes=round(count["num_trained"] * ratio["gradient"]),
        optimizer_bytes=round(count["num_trained"] * ratio["optimizer"]),
    )


def _variable_data(result: dict[str, Any]) -> VariableData | None:
    """Only where microbatches really differ: repeats of equal work vary by noise, too."""
    times = {name: values for name, values in result["relative_times"].items() if len(values) > 1}
    varying = {name: values for name, values in times.items() if max(values) - min(values) > _MIN_RELATIVE_SPREAD}
    if not varying or not result.get("data_varies"):
        return None
    return VariableData(modules=tuple(varying), samples=tuple(zip(*varying.values(), strict=True)))

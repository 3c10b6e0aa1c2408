"""Small profiles whose plans can be enumerated."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.profiles import (
    BlockCost,
    Collective,
    DeviceCost,
    LinkTier,
    MeasuredAt,
    Measurement,
    ModuleCost,
    Profile,
    Provenance,
    RecomputeCost,
    StateBytes,
)
from mindspeed_autoparallel.spec import Model, Module
from mindspeed_autoparallel.units import MIB


def block(forward_us: float, *, saved_mib: int = 10, recomputable: bool = False, output_bytes: int = MIB) -> BlockCost:
    """A block whose backward takes twice its forward."""
    recompute = {"none": RecomputeCost(saved_bytes=saved_mib * MIB, backward_peak_bytes=2 * MIB)}
    if recomputable:
        recompute["full"] = RecomputeCost(
            saved_bytes=MIB, extra_backward_us=forward_us, backward_peak_bytes=(saved_mib + 1) * MIB
        )
    return BlockCost(
        forward_us=forward_us,
        backward_us=2 * forward_us,
        recompute=recompute,
        output_bytes=output_bytes,
        dense=StateBytes(num_parameters=MIB, parameter_bytes=2 * MIB, gradient_bytes=4 * MIB, optimizer_bytes=12 * MIB),
    )


def small_profile(**changes: Any) -> Profile:
    """Two layers of encoder, four of decoder (three before a generator of ``generator_layers``, each
    ``generator_us`` forward); TP 1 and 2."""
    behind, generator_us = changes.pop("generator_layers", 0), changes.pop("generator_us", 900)
    link = LinkTier(default=Collective(latency_us=5.0, bytes_per_s=1e11))
    modules = (
        Module(name="image_encoder", result_key="vit", num_layers=2),
        Module(name="text_decoder", result_key="llm", num_layers=3 if behind else 4, predecessors=("image_encoder",)),
        *(
            Module(name="image_generator", result_key="generator", num_layers=count, predecessors=("text_decoder",))
            for count in [behind] * bool(behind)
        ),
    )
    values: dict[str, Any] = {
        "model": Model(name="small", modules=modules, sequence_length=128),
        "device": DeviceCost(
            memory_capacity_bytes=changes.pop("capacity_mib", 1000) * MIB,
            runtime_overhead_bytes=MIB,
            intra=link,
            inter=link,
            optimizer_step_us_per_byte=1e-6,
            operation_overhead_us=3.0,
        ),
        "measurements": tuple(
            Measurement(
                at=MeasuredAt(tensor_size=tensor),
                modules={
                    "image_encoder": ModuleCost(
                        pre=block(100 / tensor), layer=block(400 / tensor, recomputable=True), post=block(50 / tensor)
                    ),
                    "text_decoder": ModuleCost(
                        pre=block(10 / tensor),
                        layer=block(1000 / tensor, saved_mib=30, recomputable=True),
                        post=block(300 / tensor, saved_mib=20),
                    ),
                    **dict.fromkeys(
                        ["image_generator"] * bool(behind),
                        ModuleCost(layer=block(generator_us / tensor, recomputable=True)),
                    ),
                },
            )
            for tensor in (1, 2)
        ),
        "provenance": Provenance(source="analytic", device="imagined", created_utc=""),
    }
    values.update(changes)
    return Profile(**values)

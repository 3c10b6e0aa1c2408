"""A profile like Qwen2-VL-72B's (32 + 80 layers), computed from a few formulas and marked ``analytic``: not measured.

python tests/benchmarks/plan/synthetic_profile.py profile.json
"""

from __future__ import annotations

import sys
from pathlib import Path

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

FLOPS = 160e12
"""Sustained floating-point operations per second of the imagined device."""
GIB = 2**30
SEQUENCE = 4096
IMAGE_TOKENS = 4096
LINK_BYTES_PER_S = 150e9


def block(
    parameters: float,
    tokens: int,
    hidden: int,
    tensor: int,
    *,
    extra_flops: float = 0.0,
    saved_per_token: float,
    transient: float = 0.0,
    recomputable: bool = False,
    messages: int = 0,
) -> BlockCost:
    """A block of ``parameters`` over ``tokens``, split over ``tensor`` ranks; ``messages``: all-reduces forward."""
    compute_us = (2 * parameters * tokens + extra_flops) / tensor / FLOPS * 1e6
    output = tokens * hidden * 2
    message_us = messages * 2 * (tensor - 1) / tensor * output / LINK_BYTES_PER_S * 1e6
    forward = compute_us + message_us
    saved = round(tokens * saved_per_token * (0.3 + 0.7 / tensor))
    count = round(parameters / tensor)
    recompute = {"none": RecomputeCost(saved_bytes=saved, backward_peak_bytes=round(2 * output + transient / tensor))}
    if recomputable:
        recompute["full"] = RecomputeCost(
            saved_bytes=output,
            extra_backward_us=forward,
            forward_peak_bytes=max(0, saved - output),
            backward_peak_bytes=max(0, saved - output) + 2 * output,
        )
    return BlockCost(
        forward_us=forward,
        backward_us=2 * compute_us + message_us,
        output_bytes=output,
        recompute=recompute,
        dense=StateBytes(
            num_parameters=count, parameter_bytes=2 * count, gradient_bytes=4 * count, optimizer_bytes=12 * count
        ),
    )


def measurement(tensor: int, batch: int) -> Measurement:
    """All blocks at one TP and micro batch size."""
    hidden, vision = 8192, 1280
    text, image = SEQUENCE * batch, IMAGE_TOKENS * batch
    layer = hidden * hidden * 2 + 2 * hidden * 1024 + 3 * hidden * 29568
    vision_layer = 12 * vision * vision
    return Measurement(
        at=MeasuredAt(tensor_size=tensor, micro_batch_size=batch),
        modules={
            "image_encoder": ModuleCost(
                pre=block(1.5e6, image, vision, tensor, saved_per_token=2 * vision),
                layer=block(
                    vision_layer,
                    image,
                    vision,
                    tensor,
                    extra_flops=4 * image * IMAGE_TOKENS * vision,
                    saved_per_token=34 * vision,
                    recomputable=True,
                    messages=2,
                ),
                post=block(45e6, image // 4, hidden, tensor, saved_per_token=10 * vision),
            ),
            "text_decoder": ModuleCost(
                pre=block(0, text, hidden, tensor, saved_per_token=2 * hidden),
                layer=block(
                    layer,
                    text,
                    hidden,
                    tensor,
                    extra_flops=4 * text * SEQUENCE * hidden,
                    saved_per_token=30 * hidden,
                    recomputable=True,
                    messages=2,
                ),
                post=block(
                    152064 * hidden, text, hidden, tensor, saved_per_token=4 * hidden, transient=6 * text * 152064
                ),
            ),
        },
    )


def synthetic_profile() -> Profile:
    """TP 1 to 8, micro batch 1 and 2, 64 GiB devices, 8 or 16 to a node."""
    intra = LinkTier(default=Collective(latency_us=8.0, bytes_per_s=LINK_BYTES_PER_S))
    inter = LinkTier(default=Collective(latency_us=20.0, bytes_per_s=22e9))
    return Profile(
        model=Model(
            name="qwen2vl-72b-like",
            modules=(
                Module(
                    name="image_encoder",
                    result_key="vit",
                    num_layers=32,
                    hidden_size=1280,
                    num_heads=16,
                    tokens_per_sample=IMAGE_TOKENS,
                ),
                Module(
                    name="text_decoder",
                    result_key="llm",
                    num_layers=80,
                    hidden_size=8192,
                    num_heads=64,
                    num_kv_heads=8,
                    tokens_per_sample=SEQUENCE,
                    predecessors=("image_encoder",),
                ),
            ),
            sequence_length=SEQUENCE,
            vocab_size=152064,
        ),
        device=DeviceCost(
            memory_capacity_bytes=62 * GIB,
            runtime_overhead_bytes=2 * GIB,
            intra=intra,
            inter=inter,
            optimizer_step_us_per_byte=1.2e-5,
            optimizer_step_fixed_us=300.0,
            optimizer_peak_bytes_per_parameter_byte=2.0,
            operation_overhead_us=40.0,
            message_overhead_us=15.0,
        ),
        measurements=tuple(measurement(tensor, batch) for tensor in (1, 2, 4, 8) for batch in (1, 2)),
        provenance=Provenance(source="analytic", device="imagined 64 GiB device", created_utc="2026-01-01T00:00:00Z"),
    )


if __name__ == "__main__":
    synthetic_profile().write(Path(sys.argv[1]))

"""A language model's profile with many points, made of formulas, so that large spaces can be searched in tests."""

from __future__ import annotations

import itertools

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


def language_profile(
    *,
    num_layers: int = 32,
    tensor: tuple[int, ...] = (1, 2, 4, 8),
    context: tuple[int, ...] = (1,),
    batches: tuple[int, ...] = (1, 2, 4, 8),
    experts: tuple[int, ...] = (1,),
    capacity_mib: int = 60_000,
) -> Profile:
    """Layers of 200 M parameters; what a rank computes, saves and holds shrinks with TP and CP, grows with MBS."""
    points = [
        MeasuredAt(tensor_size=tp, context_size=cp, expert_size=ep, micro_batch_size=mbs, sequence_parallel=sp)
        for tp, cp, ep, mbs in itertools.product(tensor, context, experts, batches)
        for sp in ((False, True) if tp > 1 else (False,))
    ]
    return Profile(
        model=Model(
            name="text",
            modules=(Module(name="text_decoder", result_key="llm", num_layers=num_layers),),
            sequence_length=4096,
        ),
        device=DeviceCost(
            memory_capacity_bytes=capacity_mib * MIB,
            intra=LinkTier(default=Collective(latency_us=10.0, bytes_per_s=2e11)),
            inter=LinkTier(default=Collective(latency_us=30.0, bytes_per_s=2e10)),
            optimizer_step_us_per_byte=1e-5,
        ),
        measurements=tuple(Measurement(at=at, modules={"text_decoder": _module(at)}) for at in points),
        provenance=Provenance(source="analytic", device="made up", created_utc="2026-01-01T00:00:00+00:00"),
    )


def _module(at: MeasuredAt) -> ModuleCost:
    return ModuleCost(pre=_block(at, 0.1, 0.6), layer=_block(at, 1.0, 1.0), post=_block(at, 0.8, 0.6))


def _block(at: MeasuredAt, work: float, weight: float) -> BlockCost:
    share = at.micro_batch_size / at.tensor_size / at.context_size
    # Small pieces are less efficient, and tensor parallelism communicates.
    forward = 4000 * work * (share + 0.05) + (200 * at.micro_batch_size if at.tensor_size > 1 else 0)
    saved = int(300 * MIB * work * share * (1.0 if at.sequence_parallel or at.tensor_size == 1 else 1.4))
    hidden = int(32 * MIB * share)
    parameters = int(200e6 * weight / at.tensor_size)
    return BlockCost(
        forward_us=forward,
        backward_us=2 * forward,
        output_bytes=hidden,
        recompute={
            "none": RecomputeCost(saved_bytes=saved, backward_peak_bytes=hidden),
            "selective": RecomputeCost(
                saved_bytes=saved // 2, extra_backward_us=0.2 * forward, backward_peak_bytes=saved // 2
            ),
            "full": RecomputeCost(saved_bytes=hidden, extra_backward_us=forward, backward_peak_bytes=saved),
        },
        dense=StateBytes(
            num_parameters=parameters,
            parameter_bytes=2 * parameters,
            gradient_bytes=4 * parameters,
            optimizer_bytes=12 * parameters,
        ),
    )

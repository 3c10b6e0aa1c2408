"""Layers recomputed in groups (Megatron's method ``uniform``): only the input of a group is kept. Formula M8."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.profiles import BlockCost, RecomputeCost


def grouped_layer(layer: BlockCost, place: int, size: int) -> BlockCost:
    """Return ``layer`` as number ``place`` (from 0) of a group of ``size``, its kind ``full`` replaced.

    What the group hands on stays, the outputs between its layers do not. Its backward computes all of its layers
    again before the first of them runs backward, so the last layer's transient holds the activations of all.
    """
    plain, full = layer.recompute["none"], layer.recompute["full"]
    kept = full.saved_bytes if place == size - 1 else 0
    handed_in = full.saved_bytes if place else 0
    again = plain.saved_bytes * (place + 1) - kept
    cost = RecomputeCost(
        saved_bytes=kept,
        extra_backward_us=full.extra_backward_us,
        forward_peak_bytes=handed_in + full.forward_peak_bytes + full.saved_bytes - kept,
        backward_peak_bytes=again + max(plain.backward_peak_bytes, plain.forward_peak_bytes),
    )
    return replace(layer, recompute={**layer.recompute, "full": cost})

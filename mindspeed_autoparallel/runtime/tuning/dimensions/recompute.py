"""What is thrown away in forward and computed again in backward."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.tuning.dimensions.asked import Asked


def recompute_kinds(asked: Asked) -> tuple[str, ...]:
    """The kinds that this Megatron has."""
    if asked.has("recompute_granularity"):
        return ("none", "selective", "full")
    asked.left_out["recompute"] = "this Megatron has no --recompute-granularity"
    return ("none",)

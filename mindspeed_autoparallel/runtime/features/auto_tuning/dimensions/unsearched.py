"""What is not searched anywhere, with the reason."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.asked import Asked

_NOT_SEARCHED = (
    ("expert capacity and token dropping", "moe_expert_capacity_factor", "changes what is trained: kept as given"),
)


def name_unsearched(asked: Asked) -> None:
    """Add each of them to ``left_out``."""
    for title, destination, reason in _NOT_SEARCHED:
        missing = f"this Megatron has no --{destination.replace('_', '-')}"
        asked.left_out[title] = reason if asked.has(destination) else missing

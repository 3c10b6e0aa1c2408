"""What is not searched anywhere, with the reason."""

from __future__ import annotations

from mindspeed_autoparallel.runtime.features.auto_tuning.dimensions.context import SearchContext

_NOT_SEARCHED = (
    ("expert capacity and token dropping", "moe_expert_capacity_factor", "changes what is trained: kept as given"),
)


def name_unsearched(context: SearchContext) -> None:
    """Add each of them to ``left_out``."""
    for title, destination, reason in _NOT_SEARCHED:
        missing = f"this Megatron has no --{destination.replace('_', '-')}"
        context.left_out[title] = reason if context.has(destination) else missing

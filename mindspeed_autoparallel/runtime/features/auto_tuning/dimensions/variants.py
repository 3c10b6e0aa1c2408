"""A way to run the same layers: a MoE dispatcher, one way to split experts or attention, and so on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from mindspeed_autoparallel.profiles import MeasuredAt


def _everywhere(point: MeasuredAt) -> bool:
    return True


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Traced and searched beside the script's own way, whose title is empty."""

    title: str = ""
    settings: dict[str, object] = field(default_factory=dict)
    """Megatron's argument destinations and values."""
    applies_to: Callable[[MeasuredAt], bool] = _everywhere
    """Where it differs from the script's own way; it is traced and searched there only."""

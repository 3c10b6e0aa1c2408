"""The inputs of a plan: key ``extra`` of its file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PlannedFrom:
    """The inputs of a plan, so that it can be predicted again without the profile; empty: unknown."""

    link_us: tuple[float, ...] = ()
    """Times of the messages between stages."""
    costs: dict[str, Any] = field(default_factory=dict)
    """The profile reduced to the plan's point, in the file's format."""
    stage_times_us: tuple[tuple[float, ...], ...] = ()
    """Planned forward and backward time of every virtual stage, to detect edits."""
    unoverlapped_us: float = 0.0
    """Step of the same layers in the same layout without ``--tp-comm-overlap``, if the plan was priced with it."""

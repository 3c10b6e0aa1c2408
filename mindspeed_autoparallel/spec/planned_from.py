"""The inputs of a plan: key ``extra`` of its file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import PlanError


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


def without_text(extra: Any, where: str) -> Any:
    """Return ``extra`` of a plan file; earlier releases wrote its values as JSON text."""
    if not isinstance(extra, dict):
        return extra
    try:
        return {name: json.loads(value) if isinstance(value, str) else value for name, value in extra.items()}
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: extra of the plan is broken: {error}.") from error

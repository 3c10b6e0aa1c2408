"""What a plan was made from: key ``extra`` of its file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from mindspeed_autoparallel.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class PlannedFrom:
    """What a plan was made from, so that it can be predicted anew without the profile at hand; empty: not known."""

    link_us: tuple[float, ...] = ()
    """Of the messages between stages."""
    costs: dict[str, Any] = field(default_factory=dict)
    """The profile with the plan's own point only, as its file has it."""
    stage_times_us: tuple[tuple[float, ...], ...] = ()
    """Forward and backward of every virtual stage as planned: what differs was edited."""
    unoverlapped_us: float = 0.0
    """Step of the same layers in the same layout without ``--tp-comm-overlap``, where the plan was priced with it."""


def without_text(extra: Any, where: str) -> Any:
    """Return ``extra`` of a plan file; earlier releases wrote its values as JSON text."""
    if not isinstance(extra, dict):
        return extra
    try:
        return {name: json.loads(value) if isinstance(value, str) else value for name, value in extra.items()}
    except (ValueError, RecursionError) as error:
        raise PlanError(f"{where}: extra of the plan is broken: {error}.") from error

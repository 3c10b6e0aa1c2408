"""The state that torch keeps between two hooks: for each unit, and for all together."""

from __future__ import annotations

from dataclasses import dataclass, field

from mindspeed_autoparallel.schedule.sharded.training import Unit

IDLE, FORWARD, PRE_BACKWARD, POST_BACKWARD = range(4)


@dataclass
class State:
    """One unit, between two hooks."""

    unit: Unit
    index: int
    training: int = IDLE
    """State of the hooks."""
    group: int = IDLE
    """State of the parameters."""
    gathered: bool = False
    pending: int | None = None
    """End of its gather, until a queue waits for it."""
    reduced: int | None = None
    """End of its last reduction, until a queue waits for it."""
    held_output: int = 0
    """Bytes of the all-reduced buffer that is held until then."""
    gradient_bytes: int = 0
    accumulated_bytes: int = 0
    """Gradients of earlier micro batches in the reduction's type."""
    partial: bool = False
    has_sharded_gradient: bool = False
    order: list[int] = field(default_factory=list)


@dataclass
class Context:
    """State shared by units: the gather's buffer that is freed late, and reductions in flight."""

    copied_out: tuple[int, int, State] | None = None
    """Moment, bytes, and the unit."""
    reducing: tuple[int, int, State] | None = None

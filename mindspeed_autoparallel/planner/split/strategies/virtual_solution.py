"""What a search of a pipeline with virtual stages returns."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.planner.split.model.cuts import Cut
from mindspeed_autoparallel.planner.split.model.solution import Placement


@dataclass(frozen=True, kw_only=True)
class VirtualSolution:
    """``placement`` is ``None`` when no plan was found below the limit; ``proved`` is then true if there is none."""

    placement: Placement | None
    step_time: int
    lower_bound: int
    rounds: int
    proved: bool = False
    impossible: bool = False
    """Proved: nothing fits, whatever it takes."""
    exhausted: bool = False
    """Whether cuts over layer counts have no more to say: what is left are transients and the order of modules."""
    cuts: tuple[Cut, ...] = ()
    """Critical paths learned on the way."""

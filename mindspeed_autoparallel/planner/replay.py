"""A plan file replayed, also after an edit by hand: layers, recomputation, batch, stage times, memory limit."""

from __future__ import annotations

from dataclasses import replace
from math import isclose

from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.replay import replay_hetero
from mindspeed_autoparallel.planner.layouts.replay import edited_times, replay_pipeline
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan import EDITED, ROUNDING


def replay(plan: Plan) -> tuple[Plan, Evaluation]:
    """Return the plan with everything predicted anew. Stage times follow the layers, unless they were edited.

    Raises ``PlanError`` for a plan without the costs it was made from, and for an edit that requires another plan.
    """
    again, found = replay_pipeline(plan) if plan.hetero is None else replay_hetero(plan)
    if not edited_times(plan) and _is_as_searched(plan, again):
        return again, found
    # Proofs and comparisons of the searched plan do not hold for this one.
    searched = replace(again.search, status=EDITED, lower_bound_us=0.0, gap_fraction=0.0, relaxations=(), verdicts=())
    extra = replace(again.extra, unoverlapped_us=0.0)
    return replace(again, baselines=(), alternatives=(), search=searched, data=None, extra=extra), found


def _is_as_searched(plan: Plan, again: Plan) -> bool:
    """Return whether the replay gives the file's own step and peaks."""
    return isclose(plan.step.total_us, again.step.total_us, rel_tol=ROUNDING) and [
        (rank.peak_bytes, rank.limit_bytes) for rank in plan.memory
    ] == [(rank.peak_bytes, rank.limit_bytes) for rank in again.memory]

"""A plan file replayed, also after an edit by hand: layers, recomputation, batch, stage times, memory limit."""

from __future__ import annotations

from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.replay import replay_hetero
from mindspeed_autoparallel.planner.layouts.replay import replay_pipeline
from mindspeed_autoparallel.spec import Plan


def replay(plan: Plan) -> tuple[Plan, Evaluation]:
    """Return the plan with everything predicted anew. Stage times follow the layers, unless they were edited.

    Raises ``PlanError`` for a plan without the costs it was made from, and for an edit that asks for another plan.
    """
    return replay_pipeline(plan) if plan.hetero is None else replay_hetero(plan)

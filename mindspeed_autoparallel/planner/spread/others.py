"""The comparisons of a plan chosen by drawn steps: the next best layouts, and the whole search at the mean sample."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from mindspeed_autoparallel.planner.best_first import Proof
from mindspeed_autoparallel.planner.layouts.assembly import alternative_of
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.spec import Plan
from mindspeed_autoparallel.spec.plan_records import Alternative


def other_layouts(best: Plan, drawn: Iterable[tuple[float, Plan]], top_k: int) -> tuple[Alternative, ...]:
    """Return the ``top_k`` fastest plans of other layouts than that of ``best``, by mean drawn steps in us."""
    fastest: dict[str, Alternative] = {}
    for mean_us, plan in sorted(drawn, key=lambda item: item[0]):
        label = plan.layout.label()
        if label != best.layout.label() and label not in fastest:
            fastest[label] = alternative_of(plan.layout, ModulePlacement.of_plan(plan), plan.memory, mean_us, None)
    return tuple(fastest.values())[:top_k]


def in_whole_search(plan: Plan, whole: Plan) -> Plan:
    """Return ``plan``, found by a search of its layout alone, with the record of the search that found ``whole``."""
    own, search = plan.search, whole.search
    proof = Proof(step_us=plan.step.total_us, lower_bound_us=search.lower_bound_us, seconds=search.seconds)
    record = proof.record(
        num_configurations=search.num_configurations,
        num_solved=search.num_solved,
        verdicts=search.verdicts,
        relaxations=own.relaxations,
        limits=own.limits,
    )
    return replace(plan, search=replace(record, scope=own.scope or search.scope))

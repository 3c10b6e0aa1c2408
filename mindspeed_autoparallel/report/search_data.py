"""The search in a report: rules of thumb, other layouts, every verdict, and what would help."""

from __future__ import annotations

from typing import Any

from mindspeed_autoparallel.spec.plan import Plan

Data = dict[str, Any]

OUTCOMES = {
    "solved": "split to the end",
    "bounded": "a proved bound is no better than the plan",
    "memory": "no split fits in memory",
    "illegal": "not legal for this model or cluster",
    "unmeasured": "not covered by the profile",
    "excluded": "not requested",
    "unsolved": "not decided before the time limit",
}
"""Outcomes of a configuration in the order shown, and what they mean."""


def baselines(plan: Plan) -> list[Data]:
    """Return the plan itself first, then the rules of thumb with what they lose to it."""
    rows: list[Data] = [
        {
            "name": "this plan",
            "step_us": plan.step.total_us,
            "feasible": True,
            "loss_fraction": 0.0,
            "note": "",
            "layers": {module.name: list(plan.layers_of(module.name)) for module in plan.model.modules},
            "recompute": {module.name: list(plan.recomputed_of(module.name)) for module in plan.model.modules},
        }
    ]
    for base in plan.baselines:
        loss = None if base.step_us is None else base.step_us / plan.step.total_us - 1
        rows.append(
            {
                "name": base.title,
                "step_us": base.step_us,
                "feasible": base.feasible,
                "loss_fraction": loss,
                "note": base.note,
                "layers": {name: list(row) for name, row in base.layers.items()},
                "recompute": {name: list(row) for name, row in base.recompute.items()},
            }
        )
    return rows


def alternatives(plan: Plan) -> list[Data]:
    """Return other layouts at their best, fastest first."""
    return [
        {
            "layout": other.layout.label(),
            "step_us": other.step_us,
            "loss_fraction": other.step_us / plan.step.total_us - 1,
            "lower_bound_us": other.lower_bound_us,
            "peak_bytes": other.peak_bytes,
            "layers": {name: list(row) for name, row in other.layers.items()},
            "num_recomputed": sum(sum(row) for row in other.recompute.values()),
        }
        for other in sorted(plan.alternatives, key=lambda other: other.step_us)
    ]


def verdicts(plan: Plan) -> list[Data]:
    """Return configurations by outcome; known outcomes first, in their order, then any other by name."""
    groups: dict[str, list[Data]] = {}
    for verdict in plan.search.verdicts:
        groups.setdefault(verdict.outcome, []).append(
            {
                "layout": verdict.layout.label(),
                "reason": verdict.reason,
                "step_us": verdict.step_us,
                "lower_bound_us": verdict.lower_bound_us,
                "chosen": verdict.layout == plan.layout,
            }
        )
    order = [name for name in OUTCOMES if name in groups] + sorted(set(groups) - set(OUTCOMES))
    return [
        {
            "outcome": name,
            "meaning": OUTCOMES.get(name, name),
            "rows": sorted(groups[name], key=lambda row: row["step_us"] or row["lower_bound_us"] or float("inf")),
        }
        for name in order
    ]


def relaxations(plan: Plan) -> list[Data]:
    """Return what would help, most helpful first; those that could not be solved last."""
    rows = [
        {"change": item.change, "step_us": item.step_us, "gain_fraction": item.gain_fraction}
        for item in plan.search.relaxations
    ]
    return sorted(rows, key=lambda row: -(row["gain_fraction"] or 0.0))

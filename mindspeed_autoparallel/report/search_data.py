"""The search in a report: rules of thumb, other layouts, every verdict, and possible gains."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.spec.plan import Plan, Relaxation

OUTCOMES = {
    "solved": "split to the end",
    "bounded": "a proved bound is no better than the plan",
    "memory": "no split fits in memory",
    "illegal": "not legal for this model or cluster",
    "unmeasured": "not covered by the profile",
    "excluded": "not requested",
    "unsolved": "not decided before the time limit",
}
"""Outcomes of a configuration, in the order shown, with their meaning."""


@dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """The plan itself, or a rule of thumb."""

    name: str
    step_us: float | None
    feasible: bool
    loss_fraction: float | None
    """Share by which its step exceeds the plan's."""
    note: str
    layers: dict[str, tuple[int, ...]]
    recompute: dict[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class AlternativeRow:
    """The best split of another layout."""

    layout: str
    step_us: float
    loss_fraction: float
    lower_bound_us: float
    peak_bytes: int
    layers: dict[str, tuple[int, ...]]
    num_recomputed: int


@dataclass(frozen=True, kw_only=True)
class VerdictRow:
    """The outcome of one configuration."""

    layout: str
    reason: str
    step_us: float | None
    lower_bound_us: float | None
    chosen: bool


@dataclass(frozen=True, kw_only=True)
class VerdictGroup:
    """All configurations of one outcome, fastest first."""

    outcome: str
    meaning: str
    rows: tuple[VerdictRow, ...]


def baselines(plan: Plan) -> tuple[BaselineRow, ...]:
    """Return the plan itself first, then the rules of thumb with their losses."""
    own = BaselineRow(
        name="this plan",
        step_us=plan.step.total_us,
        feasible=True,
        loss_fraction=0.0,
        note="",
        layers={module.name: plan.layers_of(module.name) for module in plan.model.modules},
        recompute={module.name: plan.recomputed_of(module.name) for module in plan.model.modules},
    )
    others = (
        BaselineRow(
            name=base.title,
            step_us=base.step_us,
            feasible=base.feasible,
            loss_fraction=None if base.step_us is None else base.step_us / plan.step.total_us - 1,
            note=base.note,
            layers=base.layers,
            recompute=base.recompute,
        )
        for base in plan.baselines
    )
    return (own, *others)


def alternatives(plan: Plan) -> tuple[AlternativeRow, ...]:
    """Return other layouts at their best, fastest first."""
    return tuple(
        AlternativeRow(
            layout=other.layout.label(),
            step_us=other.step_us,
            loss_fraction=other.step_us / plan.step.total_us - 1,
            lower_bound_us=other.lower_bound_us,
            peak_bytes=other.peak_bytes,
            layers=other.layers,
            num_recomputed=sum(sum(row) for row in other.recompute.values()),
        )
        for other in sorted(plan.alternatives, key=lambda other: other.step_us)
    )


def verdicts(plan: Plan) -> tuple[VerdictGroup, ...]:
    """Return configurations by outcome; known outcomes first, in their order, then any other by name."""
    groups: dict[str, list[VerdictRow]] = {}
    for verdict in plan.search.verdicts:
        groups.setdefault(verdict.outcome, []).append(
            VerdictRow(
                layout=verdict.layout.label(),
                reason=verdict.reason,
                step_us=verdict.step_us,
                lower_bound_us=verdict.lower_bound_us,
                chosen=verdict.layout == plan.layout,
            )
        )
    order = [name for name in OUTCOMES if name in groups] + sorted(set(groups) - set(OUTCOMES))
    return tuple(
        VerdictGroup(
            outcome=name,
            meaning=OUTCOMES.get(name, name),
            rows=tuple(sorted(groups[name], key=lambda row: row.step_us or row.lower_bound_us or float("inf"))),
        )
        for name in order
    )


def relaxations(plan: Plan) -> tuple[Relaxation, ...]:
    """Return the relaxations, most helpful first; unsolved ones last."""
    return tuple(sorted(plan.search.relaxations, key=lambda row: -(row.gain_fraction or 0.0)))

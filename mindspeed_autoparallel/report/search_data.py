"""The search in a report: rules of thumb, other layouts, every verdict, and possible gains."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import EDITED, Relaxation, Verdict
from mindspeed_autoparallel.units import format_us

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
    lower_bound_us: float | None
    """``None`` for a mean of drawn steps, which the search does not bound."""
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
            loss_fraction=other.step_us / plan.mean_us - 1,
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


SEARCHED = ("solved", "bounded", "memory", "unsolved")
"""Outcomes of layouts that were searched."""


def virtual_comparison(plan: Plan) -> str:
    """Return a sentence that compares the best plans with and without virtual stages; empty if none was searched."""
    if plan.search.status == EDITED:
        return ""
    if plan.data is not None:
        return _drawn_comparison(plan)
    with_them = [v for v in plan.search.verdicts if v.layout.virtual_size > 1]
    searched = [v for v in with_them if v.outcome in SEARCHED]
    unsettled = [v.lower_bound_us for v in searched if v.outcome == "unsolved" and v.lower_bound_us is not None]
    still_open = ""
    if unsettled:
        still_open = f"{len(unsettled)} layouts with them are not settled, none below {format_us(min(unsettled))}"
    if plan.layout.virtual_size > 1:
        plain = _fastest([v for v in plan.search.verdicts if v.layout.virtual_size == 1])
        if plain is None or plain.step_us is None:
            return "virtual stages: without them no plan was found"
        saved = 1 - plan.step.total_us / plain.step_us
        return (
            f"virtual stages save {saved:.2%}: without them {plain.layout.label()} is the best plan found, "
            f"{format_us(plain.step_us)}{'; ' * bool(still_open)}{still_open}"
        )
    if not searched:
        return ""
    if still_open:
        return f"virtual stages: no faster plan was found; {still_open}"
    best = _fastest(searched)
    found = "" if best is None or best.step_us is None else f"; the best found is {best.layout.label()}, "
    time = "" if best is None or best.step_us is None else format_us(best.step_us)
    return f"virtual stages gain nothing: no plan with them is faster{found}{time}"


def _drawn_comparison(plan: Plan) -> str:
    """Return the sentence for a plan chosen by drawn steps.

    The search's own steps are those of plans for the mean sample, which may run out of memory on others.
    """
    has_virtual = plan.layout.virtual_size > 1
    others = [other for other in plan.alternatives if (other.layout.virtual_size > 1) != has_virtual]
    if not others:
        return ""
    best = min(others, key=lambda other: other.step_us)
    found = f"{best.layout.label()} is the fastest safe plan drawn, {format_us(best.step_us)}"
    if has_virtual:
        return f"virtual stages save {1 - plan.mean_us / best.step_us:.2%}: without them {found}"
    return f"virtual stages gain nothing: with them {found}"


def group_sizes(plan: Plan) -> str:
    """Return text on the number of consecutive microbatches of a chunk and the sizes tried; empty without virtual
    stages."""
    layout = plan.layout
    if layout.schedule != "interleaved":
        return ""
    size = layout.microbatch_group_size or layout.pipeline_size
    text = f"{size} microbatches of a chunk in a row (microbatch_group_size_per_vp_stage)"
    if plan.search.status == EDITED:
        return text
    # Group sizes depend on the pipeline size: layouts with other pipelines never differ only in groups.
    looked_at = [
        v.layout
        for v in plan.search.verdicts
        if v.outcome in SEARCHED and v.layout.pipeline_size == layout.pipeline_size
    ]
    same = [
        other for other in looked_at if replace(other, microbatch_group_size=layout.microbatch_group_size) == layout
    ]
    others = {other.microbatch_group_size or other.pipeline_size for other in same} - {size}
    if not others:
        return f"{text}; no other size came near by the order alone"
    return f"{text}; also searched: {', '.join(map(str, sorted(others)))}. Other layouts: three at most, the best found"


def _fastest(verdicts: list[Verdict]) -> Verdict | None:
    """Return the verdict with the shortest step found."""
    return min((v for v in verdicts if v.step_us is not None), key=lambda v: v.step_us or 0.0, default=None)

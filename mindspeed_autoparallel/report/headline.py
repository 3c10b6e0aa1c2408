"""The choice, its predicted speed, the sources of that figure, and warnings about it."""

from __future__ import annotations

from dataclasses import dataclass

from mindspeed_autoparallel.report.markup import percent
from mindspeed_autoparallel.spec.hetero import HeteroBest, HomogeneousBest
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import EDITED, ProfileRecord
from mindspeed_autoparallel.units import format_us

TIGHT_FRACTION = 0.03
"""Share of free memory below which a stage is reported as nearly full."""


@dataclass(frozen=True, kw_only=True)
class Headline:
    """The choice, its predicted speed, and the sources of that figure. Times of a step in microseconds."""

    model: str
    layout: str
    schedule: str
    num_nodes: int
    devices_per_node: int
    global_batch_size: int
    num_microbatches: int
    p50_us: float | None
    """``None`` if all samples are equal, like ``p95_us``."""
    p95_us: float | None
    bubble_fraction: float
    pass_overhead_us: float
    """Time of a forward or backward of one microbatch outside the stage's blocks."""
    searched: bool
    proved: bool
    proof: str
    lower_bound_us: float
    gap_fraction: float
    num_configurations: int
    num_solved: int
    search_seconds: float
    profile: ProfileRecord
    tool_version: str
    warnings: tuple[str, ...]
    """Warnings about the figures, most important first."""


def headline(plan: Plan) -> Headline:
    """Return the choice, its predicted speed, and the sources of that figure."""
    search, layout = plan.search, plan.layout
    return Headline(
        model=plan.model.name,
        layout=layout.label(),
        schedule=layout.schedule,
        num_nodes=plan.cluster.num_nodes,
        devices_per_node=plan.cluster.devices_per_node,
        global_batch_size=plan.global_batch_size,
        num_microbatches=plan.num_microbatches,
        p50_us=(plan.data or plan.step).p50_us,
        p95_us=(plan.data or plan.step).p95_us,
        bubble_fraction=plan.step.bubble_fraction,
        pass_overhead_us=pass_overhead_us(plan),
        searched=search.status != EDITED,
        proved=search.status == "optimal" and _faster_rival(plan) is None,
        proof=proof(plan),
        lower_bound_us=search.lower_bound_us,
        gap_fraction=search.gap_fraction,
        num_configurations=search.num_configurations,
        num_solved=search.num_solved,
        search_seconds=search.seconds,
        profile=plan.profile,
        tool_version=plan.tool_version,
        warnings=tuple(warnings(plan)),
    )


def pass_overhead_us(plan: Plan) -> float:
    """Return the time of a forward or backward of one microbatch outside the stage's blocks, if the plan has its
    costs."""
    try:
        return float(plan.extra.costs["device"]["operation_overhead_us"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def at_mean_sample(plan: Plan) -> str:
    """Return the label of figures that the search has for the mean sample only; empty if all samples are equal."""
    return "" if plan.data is None else ", for the mean sample"


def proof(plan: Plan) -> str:
    """Return ``proved optimal in 0.4 s`` or the gap to the bound, with the scope if the search omitted something."""
    search = plan.search
    if search.status == EDITED:
        return "priced as it is, nothing was searched"
    unmeasured = sum(verdict.outcome == "unmeasured" for verdict in search.verdicts)
    limits = [f"among splits that this host runs: {search.scope}"] if search.scope else []
    if unmeasured:
        why = "without computed costs" if plan.profile.source == "analytic" else "not measured"
        limits.append(f"{_count(unmeasured, 'configuration')} {why} and left out")
    of_what = "".join((at_mean_sample(plan), *(f"; {limit}" for limit in limits)))
    if search.status == "optimal" and _faster_rival(plan):
        return f"best of its kind, proved in {search.seconds:.1f} s{of_what}; one of the other kind is faster"
    if search.status == "optimal":
        return f"proved optimal in {search.seconds:.1f} s{of_what}"
    gap = gap_percent(search.gap_fraction)
    return f"not proved: at most {gap} from the best possible, after {search.seconds:.1f} s{of_what}"


def gap_percent(fraction: float) -> str:
    """Return ``6.4 %``; two digits below 0.1 %, where ``0.0 %`` would look like a proof. A proof has 1e-6 at most."""
    return f"{fraction * 100:.2g} %" if 1e-6 < fraction < 0.001 else percent(fraction)


def _faster_rival(plan: Plan) -> HomogeneousBest | HeteroBest | None:
    """Return the homogeneous plan that beats this hetero one, or vice versa; ``None`` if it is slower or there is
    none."""
    other = plan.hetero.homogeneous if plan.hetero is not None else plan.hetero_rival
    return other if other is not None and other.step_us < plan.mean_us else None


def warnings(plan: Plan) -> list[str]:
    """Return warnings about the figures, most important first."""
    found = []
    over = [str(rank.pipeline_rank) for rank in plan.memory if rank.peak_bytes > rank.limit_bytes]
    if over:
        found.append(f"More memory than the limit is needed on {_ranks(over)}: this plan does not fit.")
    if plan.profile.source == "analytic":
        found.append("The profile is analytic: computed from formulas, nothing was measured on this device.")
    elif plan.profile.source == "imported":
        found.append("The profile was imported from another tool: its measurements cannot be checked here.")
    if plan.profile.notes:
        found.append(f"{_count(len(plan.profile.notes), 'cost')} interpolated or assumed: see the profile's notes.")
    if rival := _faster_rival(plan):
        name = "homogeneous" if plan.hetero is not None else "hetero"
        found.append(f"The best {name} plan is faster: {rival.layout.label()} with {format_us(rival.step_us)}.")
    faster = min((other for other in plan.alternatives), key=lambda other: other.step_us, default=None)
    if faster is not None and faster.step_us < plan.mean_us:
        found.append(f"Another plan is faster: {faster.layout.label()} with {format_us(faster.step_us)}.")
    elif plan.search.status not in ("optimal", EDITED):
        why = "The search stopped before a proof"
        if plan.data is not None:
            why = "The plan is chosen by drawn steps; for the mean sample the proof has a gap"
        elif plan.search.status == "improved":
            why = "Layers of pipelines were moved between stages step by step"
        found.append(f"{why}: a plan up to {gap_percent(plan.search.gap_fraction)} faster may exist.")
    unknown = sum(verdict.outcome == "unmeasured" for verdict in plan.search.verdicts)
    if unknown:
        found.append(f"{_count(unknown, 'configuration')} not covered by the profile: not part of the proof.")
    free = {str(rank.pipeline_rank): 1 - rank.peak_bytes / rank.limit_bytes for rank in plan.memory}
    tight = {name: share for name, share in free.items() if 0 <= share < TIGHT_FRACTION}
    if tight:
        least = min(tight.values()) * 100
        found.append(f"Memory is nearly full on {_ranks(list(tight))}: {least:.1f} % left at the least.")
    return found


def _ranks(names: list[str]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"

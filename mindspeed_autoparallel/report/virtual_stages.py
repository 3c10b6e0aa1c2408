"""1F1B compared with interleaved: the gain of virtual stages in the searched layouts."""

from __future__ import annotations

from dataclasses import replace

from mindspeed_autoparallel.spec.plan import EDITED, Plan, Verdict
from mindspeed_autoparallel.units import format_us

SEARCHED = ("solved", "bounded", "memory", "unsolved")
"""Outcomes of layouts that were searched."""


def comparison(plan: Plan) -> str:
    """Return a sentence that compares the best plans with and without virtual stages; empty if none was searched."""
    if plan.search.status == EDITED:
        return ""
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

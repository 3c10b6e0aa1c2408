"""A plan of a sharded training as text, and as one page."""

from __future__ import annotations

from itertools import groupby

from mindspeed_autoparallel.report.document import document
from mindspeed_autoparallel.report.markup import element, text, text_table
from mindspeed_autoparallel.spec.sharded import ShardedDecisions
from mindspeed_autoparallel.spec.sharded_plan import ShardedOutcome, ShardedPlan
from mindspeed_autoparallel.units import format_bytes, format_us

_MOST_ROWS = 200
"""Most verdicts on the page."""


def policy_lines(decisions: ShardedDecisions) -> list[str]:
    """Return ``model.layers.{*}: 0-11 recompute, 12-47 keep`` for every pattern with policies."""
    lines = []
    for pattern, row in decisions.policies.items():
        parts = []
        for policy, run in groupby(enumerate(row), key=lambda item: item[1]):
            places = [index for index, _ in run]
            span = f"{places[0]}-{places[-1]}" if len(places) > 1 else str(places[0])
            parts.append(f"{span} {policy}")
        lines.append(f"{pattern}: {', '.join(parts)}")
    return lines


def switch_lines(decisions: ShardedDecisions) -> list[str]:
    """Return the decisions other than sizes and policies, one per line."""
    groups = [group for group in decisions.groups if group.wrapped]
    reshard = {group.reshard_after_forward for group in groups}
    ahead = {(group.forward_prefetch, group.backward_prefetch) for group in groups}
    lines = ["reshard after forward: " + ("differs by group" if len(reshard) > 1 else str(min(reshard, default=True)))]
    depth = "differs by group" if len(ahead) > 1 else "{} forward, {} backward".format(*min(ahead, default=(0, 0)))
    unit = decisions.unit_elements
    lines.append(f"gathered ahead: {unit // 2} elements, half of the unit size" if unit else f"prefetch: {depth}")
    if decisions.loss_chunk:
        lines.append(f"loss in chunks of {decisions.loss_chunk} tokens")
    if decisions.offload_optimizer:
        lines.append("optimizer state in the host's memory")
    return lines


def text_lines(plan: ShardedPlan) -> list[str]:
    step, memory, search = plan.step, plan.memory, plan.search
    proved = "proved optimal" if search.status == "optimal" else f"gap {search.gap_fraction:.2%}"
    lines = [
        f"{plan.decisions.sizes.label()}: {format_us(step.total_us)} a step, "
        f"{plan.tokens_per_s_per_device:.0f} tokens/s per device ({proved} under the cost model)",
        f"peak {format_bytes(memory.peak_bytes)} of {format_bytes(memory.limit_bytes)}, in {memory.peak_point}",
        f"compute {format_us(step.compute_us)} (recomputed {format_us(step.recompute_us)}, exchanges "
        f"{format_us(step.exchange_us)}), waiting {format_us(step.exposed_us)}, "
        f"optimizer {format_us(step.optimizer_us)}",
        *switch_lines(plan.decisions),
        *(policy_lines(plan.decisions) or ["every layer keeps its activations"]),
    ]
    for outcome in plan.baselines:
        lines.append(_compared(outcome, plan))
    return lines


def _compared(outcome: ShardedOutcome, plan: ShardedPlan) -> str:
    step, ratio = outcome.step.total_us, outcome.step.total_us / plan.step.total_us
    fits = f"{ratio:.2f} times as long" if outcome.feasible else "does not fit"
    peak = format_bytes(outcome.memory.peak_bytes)
    return f"{outcome.name} ({outcome.decisions.sizes.label()}): {format_us(step)}, peak {peak}: {fits}"


def render_sharded_page(plan: ShardedPlan) -> str:
    """Return the plan as one HTML file: no network, no other files; every value is escaped."""
    memory = [(name, format_bytes(size)) for name, size in plan.memory.terms.items()]
    steps = [(name.removesuffix("_us").replace("_", " "), format_us(us)) for name, us in vars(plan.step).items()]
    others = [
        (one.name, format_us(one.step.total_us), format_bytes(one.memory.peak_bytes), "yes" if one.feasible else "no")
        for one in (*plan.baselines, *plan.alternatives)
    ]
    verdicts = [
        (one.sizes.label(), one.outcome, *map(_time, (one.step_us, one.lower_bound_us)), one.reason)
        for one in plan.search.verdicts[:_MOST_ROWS]
    ]
    sections = [
        ("The plan", "".join(element("p", text(line)) for line in text_lines(plan))),
        ("Step", text_table(["part", "time"], steps)),
        ("Memory at the peak", text_table(["term", "bytes"], memory)),
        ("Compared", text_table(["configuration", "step", "peak", "fits"], others)),
        ("Sizes", text_table(["sizes", "outcome", "step", "at least", "reason"], verdicts)),
        ("Searched", element("p", text(plan.search.scope)) + _notes(plan)),
    ]
    body = "\n".join(element("section", element("h2", text(title)) + content) for title, content in sections)
    title = f"{plan.decisions.sizes.label()} · {plan.model}"
    foot = element("footer", text(f"mindspeed-autoparallel {plan.tool_version}. Times and memory are predictions."))
    return document(title, f"{element('h1', text(title))}\n{body}\n{foot}")


def _time(us: float | None) -> str:
    return "" if us is None else format_us(us)


def _notes(plan: ShardedPlan) -> str:
    return "".join(element("p", text(note)) for note in plan.profile.notes)

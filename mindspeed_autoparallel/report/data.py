"""What the page and the table show, as plain data: everything is computed here and only drawn elsewhere."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.planner.layouts.assembly import COSTS
from mindspeed_autoparallel.report.encoders import encoders
from mindspeed_autoparallel.report.encoders import step_parts as encoder_parts
from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.report.search_data import alternatives, baselines, relaxations, verdicts
from mindspeed_autoparallel.spec.codec import to_json
from mindspeed_autoparallel.spec.plan import Plan, StagePlan
from mindspeed_autoparallel.spec.recompute import policy_of
from mindspeed_autoparallel.units import format_us

Data = dict[str, Any]

TIGHT_FRACTION = 0.03
"""Below this share of free memory a stage is called tight."""


def report_data(plan: Plan) -> Data:
    """Return all parts as JSON-ready values; times in microseconds, sizes in bytes, shares between 0 and 1."""
    return {
        "headline": headline(plan),
        "stages": stages(plan),
        "memory": memory(plan),
        "step_parts": step_parts(plan),
        "timeline": timeline(plan),
        "baselines": baselines(plan),
        "alternatives": alternatives(plan),
        "verdicts": verdicts(plan),
        "limits": list(plan.search.limits),
        "relaxations": relaxations(plan),
        "encoders": encoders(plan),
        "data": None if plan.data is None else to_json(plan.data),
    }


def headline(plan: Plan) -> Data:
    """Return what was chosen, how fast it is said to be, and what that rests on."""
    search, layout = plan.search, plan.layout
    return {
        "model": plan.model.name,
        "num_parameters": plan.model.num_parameters,
        "layout": layout.label(),
        "schedule": layout.schedule,
        "num_nodes": plan.cluster.num_nodes,
        "devices_per_node": plan.cluster.devices_per_node,
        "num_devices": plan.cluster.num_devices,
        "global_batch_size": plan.global_batch_size,
        "num_microbatches": plan.num_microbatches,
        "step_us": plan.step.total_us,
        "p50_us": plan.step.p50_us,
        "p95_us": plan.step.p95_us,
        "tokens_per_s_per_device": plan.throughput_tokens_per_s_per_device,
        "tokens_per_s": plan.throughput_tokens_per_s_per_device * plan.cluster.num_devices,
        "bubble_fraction": plan.step.bubble_fraction,
        "pass_overhead_us": pass_overhead_us(plan),
        "proved": search.status == "optimal",
        "proof": proof(plan),
        "lower_bound_us": search.lower_bound_us,
        "gap_fraction": search.gap_fraction,
        "num_configurations": search.num_configurations,
        "num_solved": search.num_solved,
        "search_seconds": search.seconds,
        "profile": {
            "source": plan.profile.source,
            "device": plan.profile.device,
            "created_utc": plan.profile.created_utc,
            "sha256": plan.profile.sha256,
            "model_hash": plan.profile.model_hash,
            "notes": list(plan.profile.notes),
        },
        "tool_version": plan.tool_version,
        "warnings": warnings(plan),
    }


def pass_overhead_us(plan: Plan) -> float:
    """Return what a forward or backward of one microbatch takes beside the stage's blocks, where the plan has its
    costs."""
    try:
        return float(json.loads(plan.extra.get(COSTS, "{}"))["device"]["operation_overhead_us"])
    except (ValueError, TypeError, KeyError):
        return 0.0


def proof(plan: Plan) -> str:
    """Return ``proved optimal in 0.4 s`` or how far the bound is, and of what where something was left out."""
    search = plan.search
    unmeasured = sum(verdict.outcome == "unmeasured" for verdict in search.verdicts)
    limits = [f"among splits that this host runs: {search.scope}"] if search.scope else []
    if unmeasured:
        limits.append(f"{_count(unmeasured, 'configuration')} not measured and left out")
    of_what = "".join(f"; {limit}" for limit in limits)
    if search.status == "optimal":
        return f"proved optimal in {search.seconds:.1f} s{of_what}"
    gap = f"{search.gap_fraction * 100:.1f} %"
    return f"not proved: at most {gap} from the best possible, after {search.seconds:.1f} s{of_what}"


def warnings(plan: Plan) -> list[str]:
    """Return what a reader must know before trusting the figures, most important first."""
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
    faster = min((other for other in plan.alternatives), key=lambda other: other.step_us, default=None)
    if faster is not None and faster.step_us < plan.step.total_us:
        found.append(f"Another plan is faster: {faster.layout.label()} with {format_us(faster.step_us)}.")
    elif plan.search.status != "optimal":
        why = "The search stopped before a proof"
        if plan.search.status == "improved":
            why = "Layers of pipelines were moved between stages step by step"
        found.append(f"{why}: a plan up to {plan.search.gap_fraction * 100:.1f} % faster may exist.")
    unknown = sum(verdict.outcome == "unmeasured" for verdict in plan.search.verdicts)
    if unknown:
        found.append(f"{_count(unknown, 'configuration')} not covered by the profile: not part of the proof.")
    free = {str(rank.pipeline_rank): 1 - rank.peak_bytes / rank.limit_bytes for rank in plan.memory}
    tight = {name: share for name, share in free.items() if 0 <= share < TIGHT_FRACTION}
    if tight:
        least = min(tight.values()) * 100
        found.append(f"Memory is nearly full on {_ranks(list(tight))}: {least:.1f} % left at the least.")
    return found


def stages(plan: Plan) -> list[Data]:
    """Return one row per virtual stage in chain order, with its modules in model order."""
    peaks = {rank.pipeline_rank: rank for rank in plan.memory}
    rows = []
    for stage in plan.stages:
        rank = peaks.get(stage.pipeline_rank)
        rows.append(
            {
                "stage": stage.stage,
                "rank": stage.pipeline_rank,
                "chunk": stage.chunk,
                "modules": [
                    _module(stage, module.name) for module in plan.model.modules if stage.layers.get(module.name)
                ],
                "forward_us": stage.forward_us,
                "backward_us": stage.backward_us,
                "peak_bytes": rank.peak_bytes if rank else None,
                "limit_bytes": rank.limit_bytes if rank else None,
            }
        )
    return rows


def _module(stage: StagePlan, name: str) -> Data:
    first, count = stage.first_layer.get(name, 0), stage.layers[name]
    kinds = {policy_of(kind).words: number for kind, number in stage.recompute.get(name, {}).items() if number}
    return {"name": name, "first": first, "last": first + count - 1, "num_layers": count, "recompute": kinds}


def memory(plan: Plan) -> Data:
    """Return terms by rank; ``terms`` are ordered by their largest share, the same for every rank."""
    largest: Counter[str] = Counter()
    for rank in plan.memory:
        for name, size in rank.terms.items():
            largest[name] = max(largest[name], size)
    names = [name for name, size in sorted(largest.items(), key=lambda item: (-item[1], item[0])) if size]
    return {
        "terms": names,
        "ranks": [
            {
                "rank": rank.pipeline_rank,
                "peak_bytes": rank.peak_bytes,
                "limit_bytes": rank.limit_bytes,
                "peak_point": rank.peak_point,
                "sizes": [rank.terms.get(name, 0) for name in names],
            }
            for rank in plan.memory
        ],
    }


def step_parts(plan: Plan) -> list[Data]:
    """Return the parts of the step that are not nothing."""
    step = plan.step
    parts = (
        ("pipeline", step.pipeline_us),
        ("gradient reduction", step.data_parallel_us),
        ("tied embeddings", step.embedding_us),
        ("optimizer", step.optimizer_us),
    )
    return [*encoder_parts(plan), *({"name": name, "us": value} for name, value in parts if value > 0)]


def timeline(plan: Plan) -> Data:
    """Return the replayed pipeline. ``rows``: per rank a flat list of (backward 0 or 1, chunk, microbatch, start,
    length).

    ``phases`` are windows worth a look: name, start, end. ``error`` is set instead of rows where it cannot be replayed.
    """
    try:
        found = replay(plan)
    except AutoParallelError as error:
        return {"error": str(error), "rows": []}
    step = found.step
    rows: list[list[float]] = [[] for _ in range(plan.layout.pipeline_size)]
    for rank, action, start, end in sorted(step.timeline, key=lambda item: item[2]):
        rows[rank] += (int(action.kind == "B"), action.chunk, action.microbatch, _short(start), _short(end - start))
    total = step.step_time
    phases = [{"name": "Whole step", "start": 0.0, "end": total}]
    if plan.layout.pipeline_size > 1:
        # Seen from rank 0: warm-up lasts until its first backward, cool-down begins with its last forward.
        turned = min(start for rank, action, start, _ in step.timeline if rank == 0 and action.kind == "B")
        drained = max(start for rank, action, start, _ in step.timeline if rank == 0 and action.kind == "F")
        margin = 2 * max(stage.forward_us + stage.backward_us for stage in plan.stages) * plan.layout.virtual_size
        middle = (min(turned, drained) + max(turned, drained)) / 2
        phases += [
            {"name": "Warm-up", "start": 0.0, "end": min(total, turned + margin)},
            {"name": "Steady state", "start": max(0.0, middle - 2 * margin), "end": min(total, middle + 2 * margin)},
            {"name": "Cool-down", "start": max(0.0, drained - margin), "end": total},
        ]
    return {
        "end_us": total,
        "predicted_us": plan.step.pipeline_us,
        "message_us": found.message_us,
        "inferred": found.inferred,
        "variable": plan.step.p95_us is not None,
        "rows": rows,
        "num_chunks": plan.layout.virtual_size,
        "num_microbatches": plan.num_microbatches,
        "phases": phases,
        "busy": [busy / total for busy in step.busy],
        "labels": [rank_label(plan, rank) for rank in range(plan.layout.pipeline_size)],
    }


def _short(value: float) -> float:
    return round(float(value), 2)


def rank_label(plan: Plan, rank: int) -> str:
    """Return what a rank holds: ``image_encoder 0-15, text_decoder 0-3``."""
    held = []
    for stage in plan.stages:
        if stage.pipeline_rank == rank:
            for module in plan.model.modules:
                if stage.layers.get(module.name):
                    part = _module(stage, module.name)
                    held.append(f"{part['name']} {layer_range(part)}")
    return ", ".join(held)


def layer_range(module: Data) -> str:
    """Return ``0-31``, or ``7`` for a single layer."""
    return str(module["first"]) if module["num_layers"] == 1 else f"{module['first']}-{module['last']}"


def _ranks(names: list[str]) -> str:
    return f"rank {names[0]}" if len(names) == 1 else f"ranks {', '.join(names)}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun} is" if number == 1 else f"{number} {noun}s are"

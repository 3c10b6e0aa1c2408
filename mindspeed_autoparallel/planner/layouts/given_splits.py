"""The fastest plan among listed splits: for hosts that cannot run every split (``runtime.megatron.splits``).

Every listed split of every layout is evaluated exactly or skipped because of a bound, each with the least recompute
that fits, which is the fastest: a slower stage never makes a step shorter.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf

from mindspeed_autoparallel.errors import ConfigError, InfeasiblePlan
from mindspeed_autoparallel.planner.best_first import Progress, Proof, bounded_reason, silent
from mindspeed_autoparallel.planner.candidate import Candidate, Layers, Splits
from mindspeed_autoparallel.planner.evaluate import Evaluation, evaluated
from mindspeed_autoparallel.planner.layouts.assembly import assemble_plan
from mindspeed_autoparallel.planner.layouts.bounds import step_bound_us
from mindspeed_autoparallel.planner.layouts.layout_solver import LayoutResult
from mindspeed_autoparallel.planner.layouts.options import SearchOptions
from mindspeed_autoparallel.planner.layouts.space import SpaceOptions, enumerate_layouts
from mindspeed_autoparallel.planner.placement import ModulePlacement
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.spec import Cluster, Layout, Plan
from mindspeed_autoparallel.spec.plan_records import Baseline, Verdict
from mindspeed_autoparallel.units import format_bytes

FULL = "full"


def search_given(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    splits: Splits,
    options: SearchOptions | None = None,
    *,
    progress: Progress = silent,
) -> Plan:
    """Return the fastest plan whose split is one of ``splits``, proved among these under the cost model.

    Raises ``InfeasiblePlan`` naming the split that needs least memory, ``ConfigError`` if no layout has such a split.
    """
    started, options = time.monotonic(), options or SearchOptions()
    listed, verdicts = _listed(profile, cluster, global_batch_size, splits, options.space, options.layouts)
    number = sum(len(rows) for _, rows in listed)
    progress(f"{len(listed)} layouts, {number} splits of them that this host runs: {splits.description}")
    bounds = [step_bound_us(candidate) for candidate, _ in listed]
    found: list[tuple[Candidate, Evaluation]] = []
    tightest: Evaluation | None = None
    for bound_us, (candidate, rows) in sorted(zip(bounds, listed, strict=True), key=lambda pair: pair[0]):
        best_us = min((item.step_us for _, item in found), default=inf)
        if bound_us >= best_us:
            reason = bounded_reason(bound_us, best_us)
            verdicts.append(Verdict(layout=candidate.layout, outcome="bounded", reason=reason, lower_bound_us=bound_us))
            continue
        best, missing = _best_of(candidate, rows, splits)
        if best is not None:
            found.append((candidate, best))
            reason = "every split that this host runs was evaluated or bounded."
            verdicts.append(Verdict(layout=candidate.layout, outcome="solved", reason=reason, step_us=best.step_us))
        elif missing is not None:
            verdicts.append(Verdict(layout=candidate.layout, outcome="memory", reason=_shortage(missing)))
            tightest = missing if tightest is None or _excess(missing) < _excess(tightest) else tightest
    if not found:
        assert tightest is not None
        raise InfeasiblePlan(
            f"no split that this host runs fits ({splits.description}). The split that needs least memory: "
            f"{_shortage(tightest)} Use more devices, a smaller batch, or devices with more memory."
        )
    found.sort(key=lambda item: (item[1].step_us, item[0].layout.label()))
    (chosen, result), *others = [(candidate, _result(item)) for candidate, item in found[: 1 + options.top_k]]
    step_us = result.lower_bound_us
    proof = Proof(step_us=step_us, lower_bound_us=step_us, seconds=time.monotonic() - started)
    record = proof.record(num_configurations=len(verdicts), num_solved=len(found), verdicts=verdicts)
    progress(f"best: {chosen.layout.label()}, {step_us / 1000:.2f} ms, {proof.seconds:.1f} s")
    plan = assemble_plan(chosen, result, others, replace(record, scope=splits.description))
    return replace(plan, baselines=_rivals(splits, chosen, plan.baselines))


def _rivals(splits: Splits, candidate: Candidate, simple_splits: Sequence[Baseline]) -> tuple[Baseline, ...]:
    """Return the simple rules that the host can run, each with the recompute that it needs."""
    listed = [dict(layers) for layers in splits.of_layout(candidate.layout)]
    rivals = []
    for simple in simple_splits:
        if simple.layers not in listed:
            continue
        found, _ = _best_of(candidate, [simple.layers], splits)
        if found is None:
            everything = dict(simple.layers)
            rivals.append(replace(simple, feasible=False, recompute=everything, note="does not fit the memory"))
            continue
        recompute = {name: found.placement.recomputed(name) for name in simple.layers}
        rivals.append(replace(simple, feasible=True, step_us=found.step_us, recompute=recompute, note=""))
    return tuple(rivals)


def _listed(
    profile: Profile,
    cluster: Cluster,
    global_batch_size: int,
    splits: Splits,
    options: SpaceOptions,
    layouts: Sequence[Layout] | None,
) -> tuple[list[tuple[Candidate, list[Layers]]], list[Verdict]]:
    """Return every layout (of ``layouts``, if given) with its splits, and a verdict for those without."""
    candidates, verdicts = enumerate_layouts(profile, cluster, global_batch_size, options)
    if layouts is not None:
        candidates = [candidate for candidate in candidates if candidate.layout in layouts]
        verdicts = [verdict for verdict in verdicts if verdict.layout in layouts]
    listed = [(candidate, list(splits.of_layout(candidate.layout))) for candidate in candidates]
    verdicts += [
        Verdict(layout=candidate.layout, outcome="illegal", reason=f"this host runs {splits.description}.")
        for candidate, rows in listed
        if not rows
    ]
    listed = [(candidate, rows) for candidate, rows in listed if rows]
    if not listed:
        raise ConfigError(f"no layout of {cluster.num_devices} devices can be run here: {splits.description}.")
    return listed, verdicts


def _result(found: Evaluation) -> LayoutResult:
    return LayoutResult(lower_bound_us=found.step_us, evaluation=found)


def _best_of(
    candidate: Candidate, listed: Iterable[Layers], splits: Splits
) -> tuple[Evaluation | None, Evaluation | None]:
    """Return the fastest split of one layout that fits, otherwise the one nearest to its limit."""
    best: Evaluation | None = None
    tightest: Evaluation | None = None
    for least_us, layers in sorted(
        ((_busiest_us(candidate, layers), layers) for layers in listed), key=lambda pair: pair[0]
    ):
        if best is not None and least_us >= best.step_us:
            break
        item = _least_recompute(layers, candidate, by_stage=splits.recompute_by_stage)
        if not item.fits:
            tightest = item if tightest is None or _excess(item) < _excess(tightest) else tightest
        elif best is None or item.step_us < best.step_us:
            best = item
    return best, tightest


def _least_recompute(layers: Layers, candidate: Candidate, *, by_stage: bool) -> Evaluation:
    """Return the split with the least recompute that fits, or with everything recomputed if none fits."""

    def attempt(recomputed: Layers) -> Evaluation:
        recompute = {name: {FULL: row} for name, row in recomputed.items() if any(row)}
        return evaluated(candidate, ModulePlacement(layers=dict(layers), recompute=recompute))

    plain = attempt({})
    can_recompute = all(FULL in cost.layer.recompute for cost in candidate.measurement.modules.values())
    if plain.fits or not can_recompute:
        return plain
    everything = attempt(layers)
    if not by_stage or not everything.fits:
        return everything
    size = candidate.layout.pipeline_size
    (name,) = layers
    # A rank's memory does not depend on the others' recompute: all ranks are bisected at once.
    low = [0] * size
    high = [max(layers[name][rank::size]) for rank in range(size)]
    best = everything
    while any(a < b for a, b in zip(low, high, strict=True)):
        middle = [(a + b) // 2 for a, b in zip(low, high, strict=True)]
        row = tuple(min(middle[v % size], count) for v, count in enumerate(layers[name]))
        item = attempt({name: row})
        for rank in item.memory:
            index = rank.pipeline_rank
            if rank.peak_bytes <= rank.limit_bytes:
                high[index] = middle[index]
            else:
                low[index] = min(high[index], middle[index] + 1)
        if item.fits:
            best = item
    return best


def _busiest_us(candidate: Candidate, layers: Layers) -> float:
    """Return a lower bound of a split's step: its busiest stage's layers for every microbatch."""
    stages = [0.0] * candidate.layout.num_virtual_stages
    for name, row in layers.items():
        shortest = min(
            candidate.measurement.modules[name].distinct_layers, key=lambda layer: layer.forward_us + layer.backward_us
        )
        for v, count in enumerate(row):
            stages[v] += count * (shortest.forward_us + shortest.backward_us)
    size = candidate.layout.pipeline_size
    # With data of varying size some samples are cheaper than the mean, which gives no bound.
    varied = candidate.profile.variable_data is not None
    return 0.0 if varied else candidate.num_microbatches * max(sum(stages[r::size]) for r in range(size))


def _excess(evaluation: Evaluation) -> int:
    return max(rank.peak_bytes - rank.limit_bytes for rank in evaluation.memory)


def _shortage(evaluation: Evaluation) -> str:
    rank = max(evaluation.memory, key=lambda rank: rank.peak_bytes - rank.limit_bytes)
    return (
        f"pipeline rank {rank.pipeline_rank} needs {format_bytes(rank.peak_bytes)} of {format_bytes(rank.limit_bytes)} "
        "with everything recomputed."
    )

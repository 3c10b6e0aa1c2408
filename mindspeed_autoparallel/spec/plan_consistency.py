"""Contradicting numbers in a plan file, which may have been edited or damaged."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from mindspeed_autoparallel.spec.layout import Cluster, Layout
from mindspeed_autoparallel.spec.plan_records import (
    EDITED,
    ROUNDING,
    Alternative,
    RankMemory,
    SearchRecord,
    StagePlan,
    StepTime,
)

PLAN_AGAIN = (
    "Plan again, or after an edit of stages run `mindspeed-autoparallel simulate`, which computes these numbers."
)
"""The remedy for every contradiction."""
_STATUSES = ("optimal", "feasible", "improved", EDITED)
_OUTCOMES = ("solved", "bounded", "memory", "illegal", "unmeasured", "excluded", "unsolved")
_DIFFERENCES = (".gain_fraction", ".terms.messages")


def negative_numbers(value: object, where: str) -> Iterator[str]:
    """Yield a line for every negative number, except differences."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from negative_numbers(item, f"{where}.{key}")
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from negative_numbers(item, f"{where}[{index}]")
    elif isinstance(value, (int, float)) and value < 0 and not where.endswith(_DIFFERENCES):
        yield f"{where} is {value:g}, below 0."


def contradicting_sizes(
    layout: Layout, cluster: Cluster, global_batch_size: int, num_microbatches: int, stages: Sequence[StagePlan]
) -> Iterator[str]:
    """Yield a line for every mismatch of devices, samples or stage positions with the layout."""
    if layout.num_devices != cluster.num_devices:
        yield (
            f"the layout {layout.label()} is for {layout.num_devices} devices, the cluster has {cluster.num_devices}."
        )
    each = layout.data_size * layout.micro_batch_size
    if num_microbatches * each != global_batch_size:
        yield (
            f"num_microbatches is {num_microbatches}: of {layout.micro_batch_size} samples on {layout.data_size} "
            f"replicas that is a batch of {num_microbatches * each}, and global_batch_size is "
            f"{global_batch_size}."
        )
    places = [(stage.stage, stage.pipeline_rank, stage.chunk) for stage in stages]
    expected = [(v, v % layout.pipeline_size, v // layout.pipeline_size) for v in range(len(places))]
    if places != expected:
        v = next(index for index, pair in enumerate(zip(places, expected, strict=True)) if pair[0] != pair[1])
        yield f"stages[{v}] is (stage, rank, chunk) {places[v]}; {expected[v]} fits PP {layout.pipeline_size}."


def contradicting_times(step: StepTime, search: SearchRecord, encoders_us: float | None) -> Iterator[str]:
    """Yield a line for every contradiction between the step's parts, its bound and its gap.

    ``encoders_us``: time of encoders with separate layouts, outside the pipeline.
    """
    parts_us = step.pipeline_us + step.data_parallel_us + step.optimizer_us + step.embedding_us
    total_us = parts_us + (encoders_us or 0.0)
    if not math.isclose(step.total_us, total_us, rel_tol=1e-9, abs_tol=0.01):
        yield f"step.total_us is {step.total_us:g}; its parts are {total_us:g} together."
    if step.bubble_fraction > 1:
        yield f"step.bubble_fraction is {step.bubble_fraction:g}; a share is 0 to 1."
    if step.p50_us is not None and step.p95_us is not None and step.p50_us > step.p95_us:
        yield f"step.p50_us {step.p50_us:g} and p95_us {step.p95_us:g} are not in order."
    if search.gap_fraction > 1:
        yield f"search.gap_fraction is {search.gap_fraction:g}; a share is 0 to 1."
    if search.status != EDITED:
        if search.lower_bound_us > total_us * (1 + ROUNDING) + 1:
            yield f"search.lower_bound_us is {search.lower_bound_us:g}; a bound is 0 to the step, {total_us:g} us."
        gap = max(0.0, 1 - search.lower_bound_us / total_us) if total_us else 0.0
        if not math.isclose(gap, search.gap_fraction, abs_tol=1e-3):
            yield f"search.gap_fraction is {search.gap_fraction:g}; the bound is {gap:g} below the step."
        if search.status == "optimal" and gap > 2 * ROUNDING:
            yield f"search.status is optimal, and the bound is {gap:.2%} below the step."


def contradicting_memory(
    memory: Sequence[RankMemory], search: SearchRecord, pipeline_size: int, encoders_us: float | None
) -> Iterator[str]:
    """Yield a line for every rank whose memory is missing, is not the sum of its terms, or exceeds its limit."""
    ranks = [rank.pipeline_rank for rank in memory]
    if ranks != list(range(pipeline_size)):
        yield f"memory is given for pipeline ranks {ranks}; the pipeline has {pipeline_size}."
    for rank in memory:
        where, total = f"memory of pipeline rank {rank.pipeline_rank}", sum(rank.terms.values())
        # Encoders with separate layouts have memory outside the pipeline's terms.
        if rank.terms and encoders_us is None and total != rank.peak_bytes:
            yield f"{where}: peak_bytes is {rank.peak_bytes}; its terms are {total} together."
        if rank.runtime_overhead_bytes > rank.peak_bytes:
            yield f"{where}: runtime_overhead_bytes is {rank.runtime_overhead_bytes} of a peak of {rank.peak_bytes}."
        if search.status != EDITED and rank.peak_bytes > rank.limit_bytes:
            yield f"{where}: the peak, {rank.peak_bytes}, is above the limit, {rank.limit_bytes}, of a searched plan."


def contradicting_others(search: SearchRecord, alternatives: Sequence[Alternative]) -> Iterator[str]:
    """Yield a line for every impossible count, verdict, relaxation or alternative of the search."""
    if search.status not in _STATUSES:
        yield f"search.status is {search.status!r}, not one of {', '.join(_STATUSES)}."
    if search.num_solved > search.num_configurations:
        yield f"search: {search.num_solved} of {search.num_configurations} configurations cannot be solved."
    for verdict in search.verdicts:
        if verdict.outcome not in _OUTCOMES:
            yield f"the verdict on {verdict.layout.label()} is {verdict.outcome!r}, not one of {', '.join(_OUTCOMES)}."
    for relaxation in search.relaxations:
        if (relaxation.gain_fraction or 0) > 1:
            yield f"{relaxation.change!r} cannot gain {relaxation.gain_fraction:g} of the step."
    for other in alternatives:
        if (other.lower_bound_us or 0.0) > other.step_us * (1 + ROUNDING) + 1:
            yield (
                f"the alternative {other.layout.label()} takes {other.step_us:g} us, and its bound is "
                f"{other.lower_bound_us:g}."
            )

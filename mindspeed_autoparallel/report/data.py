"""The contents of page and table as records: computed here, only drawn elsewhere."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from mindspeed_autoparallel.report.answer import Answer, answer_of
from mindspeed_autoparallel.report.encoders import Encoders, StepPart, encoders, rival
from mindspeed_autoparallel.report.encoders import step_parts as encoder_parts
from mindspeed_autoparallel.report.headline import Headline, headline
from mindspeed_autoparallel.report.search_data import (
    AlternativeRow,
    BaselineRow,
    VerdictGroup,
    alternatives,
    baselines,
    relaxations,
    verdicts,
)
from mindspeed_autoparallel.report.stages import StageRow, stages
from mindspeed_autoparallel.report.timeline import Timeline, timeline
from mindspeed_autoparallel.report.virtual_stages import comparison, group_sizes
from mindspeed_autoparallel.spec.data import DataRecord
from mindspeed_autoparallel.spec.plan import Plan, Relaxation

REPORT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class MemoryBar:
    """The predicted peak on the devices of one pipeline rank."""

    rank: int
    peak_bytes: int
    limit_bytes: int
    peak_point: str
    """Point of the peak, such as ``optimizer step``."""
    sizes: tuple[int, ...]
    """Bytes of each term."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks by term and rank."""

    terms: tuple[str, ...]
    """Ordered by their largest size, the same for every rank."""
    ranks: tuple[MemoryBar, ...]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What ``report --json`` prints: everything that the page shows. Times in microseconds, sizes in bytes, shares
    between 0 and 1."""

    schema_version: int
    headline: Headline
    answer: Answer
    stages: tuple[StageRow, ...]
    memory: Memory
    step_parts: tuple[StepPart, ...]
    """The nonzero parts of the step."""
    timeline: Timeline
    baselines: tuple[BaselineRow, ...]
    """The plan itself first, then the rules of thumb."""
    alternatives: tuple[AlternativeRow, ...]
    """Fastest first."""
    verdicts: tuple[VerdictGroup, ...]
    limits: tuple[str, ...]
    relaxations: tuple[Relaxation, ...]
    """Most helpful first."""
    encoders: Encoders | None
    """``None`` if one layout serves all modules."""
    data: DataRecord | None
    """``None`` for a plan of equal samples."""
    rival: str
    """Text on the best hetero plan's lag; empty if none was searched."""


def report_data(plan: Plan) -> Report:
    """Return all parts; ``spec.to_json`` converts them to JSON values."""
    return Report(
        schema_version=REPORT_SCHEMA_VERSION,
        headline=headline(plan),
        answer=answer_of(plan),
        stages=stages(plan),
        memory=memory(plan),
        step_parts=step_parts(plan),
        timeline=timeline(plan),
        baselines=baselines(plan),
        alternatives=alternatives(plan),
        verdicts=verdicts(plan),
        limits=(*filter(None, [comparison(plan), group_sizes(plan)]), *plan.search.limits),
        relaxations=relaxations(plan),
        encoders=encoders(plan),
        data=plan.data,
        rival=rival(plan),
    )


def memory(plan: Plan) -> Memory:
    """Return the terms of memory by rank."""
    largest: Counter[str] = Counter()
    for rank in plan.memory:
        for name, size in rank.terms.items():
            largest[name] = max(largest[name], size)
    names = tuple(name for name, size in sorted(largest.items(), key=lambda item: (-item[1], item[0])) if size)
    return Memory(
        terms=names,
        ranks=tuple(
            MemoryBar(
                rank=rank.pipeline_rank,
                peak_bytes=rank.peak_bytes,
                limit_bytes=rank.limit_bytes,
                peak_point=rank.peak_point,
                sizes=tuple(rank.terms.get(name, 0) for name in names),
            )
            for rank in plan.memory
        ),
    )


def step_parts(plan: Plan) -> tuple[StepPart, ...]:
    """Return the nonzero parts of the step."""
    step = plan.step
    parts = (
        ("pipeline", step.pipeline_us),
        ("gradient reduction", step.data_parallel_us),
        ("tied embeddings", step.embedding_us),
        ("optimizer", step.optimizer_us),
    )
    return (*encoder_parts(plan), *(StepPart(name, value) for name, value in parts if value > 0))

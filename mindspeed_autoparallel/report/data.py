"""The contents of page and table as records: computed here, only drawn elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.report import search_data
from mindspeed_autoparallel.report.answer import Answer, answer_of
from mindspeed_autoparallel.report.encoders import Encoders, StepPart, encoder_phases, encoders, rival
from mindspeed_autoparallel.report.encoders import step_parts as encoder_parts
from mindspeed_autoparallel.report.headline import Headline, headline
from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.report.stages import StageRow, rank_label, stages
from mindspeed_autoparallel.schedule import SimulatedStep
from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.spec.plan_records import DataRecord, RankMemory, Relaxation


@dataclass(frozen=True)
class Window:
    """A notable part of the step, in microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The replayed pipeline, with encoders' phases before and after it on every rank; microseconds."""

    error: str = ""
    """Reason why the step cannot be replayed; all other fields are empty then."""
    end_us: float = 0.0
    predicted_us: float = 0.0
    """The plan's prediction for the same time."""
    names: tuple[str, ...] = ()
    """Names of the encoders' phases."""
    message_us: float = 0.0
    """Time of the slowest message between stages."""
    inferred: bool = False
    """Whether that time was derived from the predicted pipeline time."""
    variable: bool = False
    """Whether the predicted time is a mean over sampled microbatches."""
    rows: tuple[tuple[float, ...], ...] = ()
    """Per rank a flat list of (kind, chunk, number, start, length); kind 0 and 1 are forward and backward of a
    microbatch, 2 is a phase of ``names``."""
    num_chunks: int = 1
    num_microbatches: int = 0
    phases: tuple[Window, ...] = ()
    busy: tuple[float, ...] = ()
    """Share of the step in which each rank computes."""
    labels: tuple[str, ...] = ()
    """Layers of each rank."""


def timeline(plan: Plan) -> Timeline:
    """Return the replayed step, or the reason for a missing one."""
    try:
        found = replay(plan)
    except AutoParallelError as error:
        return Timeline(error=str(error))
    step = found.step
    rows: list[list[float]] = [[] for _ in range(plan.layout.pipeline_size)]
    before, after = encoder_phases(plan)
    names: list[str] = []
    offset = _put_phases(rows, names, before, 0.0)
    for rank, action, start, end in sorted(step.timeline, key=lambda item: item[2]):
        kind = int(action.kind == "B")
        rows[rank] += (kind, action.chunk, action.microbatch, _short(offset + start), _short(end - start))
    total = _put_phases(rows, names, after, offset + step.step_time)
    outside = total - step.step_time
    return Timeline(
        end_us=total,
        predicted_us=plan.step.pipeline_us + outside,
        names=tuple(names),
        message_us=found.message_us,
        inferred=found.inferred,
        variable=plan.step.p95_us is not None,
        rows=tuple(map(tuple, rows)),
        num_chunks=plan.layout.virtual_size,
        num_microbatches=plan.num_microbatches,
        phases=(Window("Whole step", 0.0, total), *_windows(plan, step, offset, total)),
        busy=tuple((busy + outside) / total for busy in step.busy),
        labels=tuple(rank_label(plan, rank) for rank in range(plan.layout.pipeline_size)),
    )


def _windows(plan: Plan, step: SimulatedStep, offset: float, total: float) -> tuple[Window, ...]:
    """Return warm-up, steady state and cool-down of rank 0: warm-up lasts until its first backward, cool-down begins
    with its last forward."""
    if plan.layout.pipeline_size == 1:
        return ()
    first = [(action.kind, offset + start) for rank, action, start, _ in step.timeline if rank == 0]
    turned = min(start for kind, start in first if kind == "B")
    drained = max(start for kind, start in first if kind == "F")
    margin = 2 * max(stage.forward_us + stage.backward_us for stage in plan.stages) * plan.layout.virtual_size
    middle = (min(turned, drained) + max(turned, drained)) / 2
    return (
        Window("Warm-up", offset, min(total, turned + margin)),
        Window("Steady state", max(0.0, middle - 2 * margin), min(total, middle + 2 * margin)),
        Window("Cool-down", max(0.0, drained - margin), offset + step.step_time),
    )


def _put_phases(rows: list[list[float]], names: list[str], phases: Sequence[StepPart], start: float) -> float:
    """Add ``phases`` one after another to every row; return where the last one ends."""
    for phase in phases:
        for row in rows:
            row += (2, 0, len(names), _short(start), _short(phase.us))
        names.append(phase.name)
        start += phase.us
    return start


def _short(value: float) -> float:
    return round(float(value), 2)


REPORT_SCHEMA_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Peaks by term and rank."""

    terms: tuple[str, ...]
    """Ordered by their largest size, the same for every rank."""
    ranks: tuple[RankMemory, ...]


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
    baselines: tuple[search_data.BaselineRow, ...]
    """The plan itself first, then the rules of thumb."""
    alternatives: tuple[search_data.AlternativeRow, ...]
    """Fastest first."""
    verdicts: tuple[search_data.VerdictGroup, ...]
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
        baselines=search_data.baselines(plan),
        alternatives=search_data.alternatives(plan),
        verdicts=search_data.verdicts(plan),
        limits=(
            *filter(None, [search_data.virtual_comparison(plan), search_data.group_sizes(plan)]),
            *plan.search.limits,
        ),
        relaxations=search_data.relaxations(plan),
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
    return Memory(terms=names, ranks=plan.memory)


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

"""The replayed step as rows that the page's script draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mindspeed_autoparallel.errors import AutoParallelError
from mindspeed_autoparallel.report.encoders import StepPart, encoder_phases
from mindspeed_autoparallel.report.replay import replay
from mindspeed_autoparallel.report.stages import rank_label
from mindspeed_autoparallel.schedule import SimulatedStep
from mindspeed_autoparallel.spec.plan import Plan


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

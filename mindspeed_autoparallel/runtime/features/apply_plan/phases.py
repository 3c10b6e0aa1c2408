"""The phases of a hetero-parallel step: each planned time beside the measured one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mindspeed_autoparallel.spec.plan import Plan
from mindspeed_autoparallel.units import US_PER_MS

_EXCHANGE, _FINALIZE = "redistribution", "gradient reduction of encoders"


def phases_so_far(plan: Plan) -> dict[str, float]:
    """Return the microseconds this rank has spent in each phase since its log line; empty without hetero parallel."""
    if plan.hetero is None:
        return {}
    from mindspeed_autoparallel.runtime.hetero.job import current_job

    session = current_job().session
    if session is None:
        return {}
    seconds: dict[str, float] = {}
    for comm in session.encoder_comms:
        seconds[_forward(comm.encoder.name)] = comm.seconds["encode"]
        seconds[_backward(comm.encoder.name)] = comm.seconds["encoder_backward"]
    times = session.times
    for comm in session.generator_comms:
        seconds[_between_passes(comm.encoder.name)] = times.generate
    seconds[_EXCHANGE] = times.redistribute + times.metadata + times.planning
    seconds[_backbone(plan)] = times.backbone
    seconds[_FINALIZE] = times.finalize
    return {name: value * 1e6 for name, value in seconds.items()}


def predicted_us(plan: Plan) -> dict[str, float]:
    """Return the plan's microseconds of each phase, by the names of ``phases_so_far``."""
    record = plan.hetero
    assert record is not None
    found: dict[str, float] = {}
    encoders = [phase for phase in record.encoders if not phase.generator]
    inside = [phase for phase in record.encoders if phase.generator]
    for phase in encoders:
        found[_forward(phase.module)], found[_backward(phase.module)] = phase.forward_us, phase.backward_us
    found[_EXCHANGE] = sum(phase.exchange_us for phase in encoders)
    for phase in inside:
        found[_between_passes(phase.module)] = phase.forward_us + phase.backward_us + phase.exchange_us
    # Megatron reduces the backbone's gradients at the end of its schedule.
    found[_backbone(plan)] = plan.step.pipeline_us + plan.step.data_parallel_us + plan.step.embedding_us
    found[_FINALIZE] = sum(phase.reduction_us for phase in record.encoders)
    return found


def phase_lines(plan: Plan, ranks: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the table's lines, the slowest rank of each phase; nothing unless encoders have their own layouts."""
    if plan.hetero is None:
        return []
    lines = [f"{'phase':34s}  predicted ms  measured ms (slowest rank)"]
    for name, predicted in predicted_us(plan).items():
        measured = [rank[name] for rank in ranks if name in rank]
        text = f"{max(measured) / US_PER_MS:12.1f}" if measured else "not measured"
        lines.append(f"{name:34s} {predicted / US_PER_MS:13.1f} {text}")
    return lines


def _between_passes(module: str) -> str:
    return f"{module} between passes"


def _forward(module: str) -> str:
    return f"{module} forward"


def _backward(module: str) -> str:
    return f"{module} backward"


def _backbone(plan: Plan) -> str:
    return f"{plan.backbone} pipeline and reduction"

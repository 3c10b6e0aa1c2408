"""The parts of a hetero plan's gain due to the layouts, the batch scale and recomputation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from mindspeed_autoparallel.planner.hetero.backbone import outside_pipeline_fits
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.solved import Solved, reserved_by
from mindspeed_autoparallel.planner.hetero.space import phase_of
from mindspeed_autoparallel.spec import ModuleLayout
from mindspeed_autoparallel.spec.hetero import EncoderPhase, HeteroRecord

SOLVE_S = 5.0
"""Time limit for each of the two additional plans, in seconds."""


def with_parts_of_the_gain(
    best: Solved, costs: Sequence[Sequence[EncoderCosts]], balance: str, limit_bytes: int
) -> HeteroRecord:
    """Return ``best``'s record with the steps of the same layouts at batch scale 1, and with activations kept; if that
    does not fit, at batch scale 1 in the plan's memory mode."""
    kept = _step_us(best, costs, balance, limit_bytes, scale_one=False)
    scale_one = _step_us(best, costs, balance, limit_bytes, scale_one=True)
    again = None
    if scale_one is None and best.record.memory == "recompute":
        again = _step_us(best, costs, balance, limit_bytes, scale_one=True, memory="recompute")
    return replace(
        best.record,
        kept_us=best.step_us if best.record.memory == "upfront" else kept,
        scale_one_us=scale_one,
        scale_one_again_us=again,
    )


def _step_us(
    best: Solved,
    costs: Sequence[Sequence[EncoderCosts]],
    balance: str,
    limit_bytes: int,
    *,
    scale_one: bool,
    memory: str = "upfront",
) -> float | None:
    solver = best.solver
    phases: list[EncoderPhase] = []
    for phase, own in zip(best.record.encoders, solver.all_costs(costs), strict=True):
        sizes: ModuleLayout = replace(phase.layout, micro_batch_scale=1) if scale_one else phase.layout
        cost = next(
            one
            for one in own
            if (one.point.tensor_size, one.point.context_size) == (sizes.tensor_size, sizes.context_size)
        )
        phases.append(phase_of(cost, sizes, solver.candidate, solver.cluster, memory=memory, balance=balance))
    record = HeteroRecord(memory=memory, balance=balance, encoders=tuple(phases))
    reserved = reserved_by(record)
    found = solver.solve(reserved, SOLVE_S).evaluation
    if found is None or not outside_pipeline_fits(found, limit_bytes, reserved, record.transient_bytes):
        return None
    return found.step.total_us + record.total_us

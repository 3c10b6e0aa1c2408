"""Memory mode window beside a solved pipeline: the step replayed with the encoders' batches inside the schedule.

Not part of the proof: it is tried beside splits that were found for the other modes, which need not be the best for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

from mindspeed_autoparallel.planner.evaluate import Evaluation
from mindspeed_autoparallel.planner.hetero.encoder_costs import EncoderCosts
from mindspeed_autoparallel.planner.hetero.encoders import WINDOW, encoder_phase, macro_batches
from mindspeed_autoparallel.planner.hetero.solved import Solved
from mindspeed_autoparallel.planner.hetero.space import distinct_scales
from mindspeed_autoparallel.planner.stage_times import NS_PER_US, beside_blocks_ns
from mindspeed_autoparallel.profiles import Profile
from mindspeed_autoparallel.schedule.window import BackboneTimes, MacroBatchTimes, window_step_us
from mindspeed_autoparallel.spec import Layout, ModuleLayout
from mindspeed_autoparallel.spec.hetero import HeteroRecord

MOST_REPLAYS = 2000
"""Of windows, in one search."""
WORTH = 0.01
"""Of the step: a plan that is proved is not given up for less."""


def backbone_times(profile: Profile, layout: Layout, found: Evaluation, num_microbatches: int) -> BackboneTimes:
    """Return the pipeline of ``found`` as the replay takes it."""
    beside_us = [time_ns / NS_PER_US for time_ns in beside_blocks_ns(profile.device, layout)]
    message_us = profile.device.message_us(layout.schedule)
    return BackboneTimes(
        forward_us=[stage.forward_us + more for stage, more in zip(found.stages, beside_us, strict=True)],
        backward_us=[stage.backward_us + more for stage, more in zip(found.stages, beside_us, strict=True)],
        link_us=[link + message_us for link in found.link_us],
        num_microbatches=num_microbatches,
    )


def window_choices(best: Solved, others: Sequence[Solved], costs: Sequence[Sequence[EncoderCosts]]) -> list[Solved]:
    """Return choices in mode window that are worth giving up ``best`` for, fastest first, beside the splits of
    ``others``."""
    found: list[Solved] = []
    left = MOST_REPLAYS
    for other in others:
        solver = other.solver
        layout = solver.candidate.layout
        if layout.virtual_size > 1 or other.result.evaluation is None:
            continue
        sizes = [_sizes_of(own, other) for own in costs]
        for chosen in product(*sizes):
            left -= 1
            if left < 0:
                break
            made = _made(other, other.result.evaluation, chosen)
            if made is not None and made.step_us < best.step_us * (1 - WORTH):
                found.append(made)
    return sorted(found, key=lambda made: made.step_us)


def _sizes_of(own: Sequence[EncoderCosts], other: Solved) -> list[tuple[EncoderCosts, ModuleLayout]]:
    devices = other.solver.cluster.num_devices
    return [
        (
            costs,
            ModuleLayout(
                tensor_size=costs.point.tensor_size,
                context_size=costs.point.context_size,
                data_size=devices // (costs.point.tensor_size * costs.point.context_size),
                micro_batch_scale=scale,
            ),
        )
        for costs in own
        for scale in distinct_scales(other.solver.candidate.num_microbatches)
    ]


def _made(other: Solved, evaluation: Evaluation, chosen: Sequence[tuple[EncoderCosts, ModuleLayout]]) -> Solved | None:
    """Return the choice, or ``None`` where it does not fit."""
    solver = other.solver
    candidate, cluster, balance = solver.candidate, solver.cluster, other.record.balance
    phases = tuple(
        encoder_phase(costs, sizes, candidate, cluster, memory=WINDOW, balance=balance) for costs, sizes in chosen
    )
    record = HeteroRecord(memory=WINDOW, balance=balance, encoders=phases)
    # The peaks are those beside what the solve had reserved, limits too.
    before = next(reserved for reserved, result in solver.solved if result is other.result)
    more = record.reserved_bytes - before.everywhere_bytes
    at_first = record.first_stage_bytes - before.first_stage_bytes
    if any(
        rank.peak_bytes + more + (at_first if rank.pipeline_rank == 0 else 0) > rank.limit_bytes
        for rank in evaluation.memory
    ):
        return None
    batches = [macro_batches(costs, sizes, candidate, cluster, balance=balance) for costs, sizes in chosen]
    backbone = backbone_times(solver.backbone, candidate.layout, evaluation, candidate.num_microbatches)
    record = replace(record, interleaving_us=interleaving_us(backbone, batches, evaluation.step.pipeline_us, record))
    step_us = evaluation.step.total_us + record.total_us
    lower_us = other.result.lower_bound_us + _around_us(batches, candidate.layout.pipeline_size)
    return replace(other, record=record, step_us=step_us, lower_bound_us=min(step_us, lower_us))


def _around_us(batches: Sequence[Sequence[MacroBatchTimes]], num_stages: int) -> float:
    """Return what the first stage does before its first forward and after its last backward: the whole pipeline lies
    between."""
    total = 0.0
    for own in batches:
        total += own[0].inputs_us + own[0].forward_us[0] + own[0].outputs_us
        total += sum(
            batch.gradients_us + batch.backward_us[0] for batch in own if batch.last > own[-1].last - num_stages
        )
    return total


def interleaving_us(
    backbone: BackboneTimes, batches: Sequence[Sequence[MacroBatchTimes]], pipeline_us: float, record: HeteroRecord
) -> float:
    """Return the replayed step less the pipeline and the encoders' forwards, backwards and transfers one by one."""
    alone = sum(
        batch.inputs_us + batch.forward_us[0] + batch.outputs_us + batch.gradients_us + batch.backward_us[0]
        for own in batches
        for batch in own
    )
    return window_step_us(backbone, batches) - pipeline_us - alone
